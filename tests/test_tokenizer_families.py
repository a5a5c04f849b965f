"""Tokenizers of every family.

tokenizer.json as the library computes it, and the GGUF metadata written of it, give the same ids and text.
"""
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizer_families import FAMILIES, SPECIAL, gguf_metadata, of_fast, of_source, sentence_piece, texts, unigram, unigram_metadata
from tokenizers import Tokenizer as Fast

from lora_bench.engine.base_parts import TokenizerSource
from lora_bench.engine.tokenizer import TextStream, Tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = TextStream(tokenizer)
    return "".join(stream.push(i) for i in ids) + stream.finish()


def same(fast: Fast, ours: list[Tokenizer], seed: int) -> None:
    """Ids as the library's, with and without special tokens parsed; text the same, whole and streamed."""
    for special in (True, False):
        fast.encode_special_tokens = not special
        for text in texts(seed):
            ids = fast.encode(text, add_special_tokens=False).ids
            for tokenizer in ours:
                assert tokenizer.encode(text, special) == ids, text
                assert streamed(tokenizer, ids) == tokenizer.decode(ids) == fast.decode(ids), text


@pytest.mark.parametrize("family", FAMILIES)
def test_byte_level_families(family: str, tmp_path: Path, seed: int) -> None:
    pre, make = FAMILIES[family]
    fast = make()
    metadata = gguf_metadata(fast, pre=pre)
    same(fast, [of_fast(fast, tmp_path), of_source(TokenizerSource(metadata=metadata), 4096)], seed)


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_sentence_piece_families(prefix: bool, tmp_path: Path, seed: int) -> None:
    fast = sentence_piece(prefix)
    metadata = gguf_metadata(fast, add_space_prefix=prefix)
    same(fast, [of_fast(fast, tmp_path), of_source(TokenizerSource(metadata=metadata), 4096)], seed)


@pytest.mark.parametrize("clean", [False, True], ids=["spaces kept", "spaces cleaned"])
def test_unigram_family(clean: bool, seed: int) -> None:
    fast = unigram()
    fast.encode_special_tokens = True
    ours = of_source(TokenizerSource(metadata=unigram_metadata(fast, clean)), 4096)
    for text in [*texts(seed), " x", "  x  y ", "\n x", " \tx\n "]:
        cleaned = re.sub(" {2,}", " ", text).strip(" ") if clean else text
        assert ours.encode(text, special=False) == fast.encode(cleaned, add_special_tokens=False).ids, text


def test_long_runs_take_no_quadratic_time(tmp_path: Path) -> None:
    """100 kB of one character is a single word: seconds, were its merges looked for again and again, would be minutes."""
    for fast in (FAMILIES["llama 3"][1](), sentence_piece(True)):
        tokenizer = of_fast(fast, tmp_path)
        for run in ("a", " ", "漢", "\n"):
            ids = tokenizer.encode(run * 100_000, special=True)
            assert tokenizer.decode(ids) == run * 100_000


def test_special_tokens_of_users_stay_text(tmp_path: Path) -> None:
    for fast in (FAMILIES["qwen2, qwen3"][1](), sentence_piece(True)):
        for tokenizer in (of_fast(fast, tmp_path), of_source(TokenizerSource(metadata=gguf_metadata(fast, pre="qwen2")), 4096)):
            text = "".join(SPECIAL)
            ids = tokenizer.encode(text, special=False)
            assert not set(ids) & {tokenizer.id_of(token) for token in SPECIAL} and tokenizer.decode(ids) == text
            assert tokenizer.encode(text, special=True) == [tokenizer.id_of(token) for token in SPECIAL]
            plain = tokenizer.encode("<think>", special=False)
            assert plain == [tokenizer.id_of("<think>")], "a plain added token is a token wherever it stands"


@pytest.mark.parametrize("container", ["tokenizer.json", "GGUF, user-defined", "GGUF, plain"])
def test_marks_of_turns_are_special_whatever_a_converter_noted(container: str, tmp_path: Path) -> None:
    fast = FAMILIES["gpt-2"][1]()
    changed = json.loads(fast.to_str())
    mark = next(token for token in changed["added_tokens"] if token["content"] == "<|im_end|>")
    mark |= {"special": False, "rstrip": True}
    metadata = gguf_metadata(fast, pre="gpt-2")
    metadata["tokenizer.ggml.token_type"][mark["id"]] = 4 if "user-defined" in container else 1
    tokenizer = (of_source(TokenizerSource(metadata=metadata), 4096) if "GGUF" in container
                 else of_fast(Fast.from_str(json.dumps(changed)), tmp_path))
    assert mark["id"] not in tokenizer.encode("<|im_end|>", special=False) and tokenizer.decode([mark["id"]]) == ""
    assert tokenizer.encode("<|im_end|>", special=True) == [mark["id"]] and "<|im_end|>" in tokenizer.special.ids
    assert tokenizer.eats_space[mark["id"]] == (False, container == "tokenizer.json")
    assert tokenizer.encode("<think>", special=False) == [tokenizer.id_of("<think>")], "other plain ones stay as they are"


def test_rows_without_token_have_no_text(tmp_path: Path) -> None:
    fast = FAMILIES["gpt-2"][1]()
    metadata = gguf_metadata(fast, pre="gpt-2")
    filler = metadata["tokenizer.ggml.token_type"].index(5)
    tokenizer = of_source(TokenizerSource(metadata=metadata), 4096)
    assert tokenizer.decode([filler]) == "" and tokenizer.token_text([filler]) == [f"<{filler}>"] and tokenizer.spelling(filler) is None
    assert filler not in tokenizer.encode(f"[PAD{filler}]", special=True)


@pytest.mark.parametrize("pre, adds", [("llama-bpe", True), ("tekken", True), ("smaug-bpe", False), ("qwen2", False), ("dbrx", False)])
def test_bos_of_files_that_do_not_say(pre: str, adds: bool) -> None:
    fast = FAMILIES["gpt-2"][1]()
    tokenizer = of_source(TokenizerSource(metadata=gguf_metadata(fast, pre=pre), bos=1), 4096)
    assert tokenizer.add_bos is adds

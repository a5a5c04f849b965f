"""Tokenizer files that nobody vouches for: a sentence that names the file, in bounded time, whatever they hold."""
from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_families import FAMILIES, gguf_metadata, of_source, sentence_piece

from lora_bench.engine.base_parts import TokenizerSource
from lora_bench.engine.tokenizer import Tokenizer
from lora_bench.engine.weights.files import FormatError

BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def small(**parts: Any) -> dict[str, Any]:
    """A tokenizer.json of single characters, with these parts of it replaced."""
    vocab = {chr(code): code - 32 for code in range(32, 127)}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
            "post_processor": None, "decoder": BYTES, "model": {"type": "BPE", "vocab": vocab, "merges": []}} | parts


def opened(tmp_path: Path, known: dict[str, Any] | str, **source: Any) -> Tokenizer:
    path = tmp_path / "tokenizer.json"
    path.write_text(known if isinstance(known, str) else json.dumps(known))
    return of_source(TokenizerSource(path=path, **source), 1 << 20)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def charsmap(blob: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


def added(number: int, content: str) -> dict[str, Any]:
    return {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def test_a_text_is_written_once(tmp_path: Path) -> None:
    """The library repeats the ids of a text as often as a template says, also where no special tokens are asked for."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {"type": "TemplateProcessing", "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {}}
    assert opened(tmp_path, small(post_processor=template | {"single": [text]})).encode("ab", special=False) == [65, 66]
    for processor in (template | {"single": [text] * 300}, {"type": "Sequence", "processors": [template | {"single": [text] * 300}]}):
        with pytest.raises(FormatError, match="post_processor writes a text 300 times"):
            opened(tmp_path, small(post_processor=processor))


@pytest.mark.parametrize("pattern", [
    r"(a+)+$", r"(\w+)+$", r"(a|a)*b", r"([^x]|y)*z", r"a+[bc]", r"[^\s]*\d\d", r"(\s|\n)*\n!?x", "(" * 200, "[z-a]", "x" * 9000,
    r"\p{Nonsense}",
])
def test_patterns_that_stall(pattern: str, tmp_path: Path) -> None:
    """Of exponential and square time, or none at all: refused when the tokenizer is opened, so that no prompt waits for them."""
    with pytest.raises(FormatError, match="its pattern fails on|which takes too long|cannot be built|patterns of more than") as error:
        opened(tmp_path, small(pre_tokenizer=split(pattern)))
    assert str(tmp_path) in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("pattern", [r"(.*a){12}$", r"((((a?){30}){30}){30}){30}b", r"(?<=a+)b"])
def test_patterns_that_the_engine_bounds(pattern: str, tmp_path: Path) -> None:
    try:
        tokenizer = opened(tmp_path, small(pre_tokenizer=split(pattern)))
    except FormatError as error:
        assert str(tmp_path) in str(error)
        return
    for text in ("a" * 5000, " " * 5000, "ab" * 5000):
        try:
            tokenizer.encode(text, special=True)
        except FormatError as error:
            assert "fails on this text" in str(error)


@pytest.mark.parametrize("parts, words", [
    ({"normalizer": replace("a", "b" * 1000)}, "lengthen a text more than 64 times"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 100_000}}, "lengthen a text"),
    ({"normalizer": {"type": "Sequence", "normalizers": [replace("a", "aa")] * 30}}, "lengthen a text"),
    ({"normalizer": {"type": "Sequence", "normalizers": [replace("a", "b")] * 90}}, "in 90 steps"),
    ({"normalizer": charsmap((4).to_bytes(4, "little") + b"\0" * 4 + b"x" * 100_000)}, "lengthen a text"),
    ({"normalizer": charsmap(b"\xff" * 64)}, "cannot be built"),
    ({"normalizer": charsmap((4).to_bytes(4, "little") + b"\xff" * 4 + b"abc\0")}, "fails on plain text"),
    ({"normalizer": charsmap(b"")}, "cannot be built"),
    ({"decoder": None}, "has no decoder"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}}, "Fuse, ByteFallback.? in this order"),
    ({"decoder": {"type": "Strip", "content": "x", "start": 1, "stop": 0}}, "decodes with Strip"),
    ({"model": {"type": "None"}}, "cannot be built"),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "cannot be built"),
    ({"model": {"type": "Unigram", "vocab": [], "unk_id": 7}}, "cannot be built"),
    ({"added_tokens": [added(95, "<a>"), added(95, "<b>")]}, "cannot be built|declares the added token"),
])
def test_parts_that_cannot_be_honoured(parts: dict[str, Any], words: str, tmp_path: Path) -> None:
    declared = {token["content"]: token["id"] for token in parts.get("added_tokens", ())}
    with pytest.raises(FormatError, match=words) as error:
        opened(tmp_path, small(**parts), added=declared)
    assert str(error.value).startswith(str(tmp_path))


def test_added_ids_that_would_move_are_refused(tmp_path: Path) -> None:
    """The library numbers added tokens in their order, whatever the file says."""
    with pytest.raises(FormatError, match=r"declares the added token '<b>' as id 200, but .* it becomes 96"):
        opened(tmp_path, small(added_tokens=[added(95, "<a>"), added(200, "<b>")]), added={"<a>": 95, "<b>": 200})


def test_dropout_belongs_to_training(tmp_path: Path) -> None:
    model = {"type": "BPE", "dropout": 0.9, "vocab": {"a": 0, "aa": 1, "aaaa": 2}, "merges": [["a", "a"], ["aa", "aa"]]}
    tokenizer = opened(tmp_path, small(model=model))
    assert {tuple(tokenizer.encode("aaaa" * 5, special=True)) for _ in range(20)} == {(2,) * 5}


@pytest.mark.parametrize("text",
                         ["[" * 100_000, '{"model":' * 5000, "", "null", "\0", '{"version": "1.0"}', '{"added_tokens": {}}', "\ud83d"])
def test_what_is_no_tokenizer(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(FormatError, match="tokenizer.json: the tokenizer cannot be built"):
        of_source(TokenizerSource(path=path), 100)


def test_many_added_tokens_are_no_slower_to_find(tmp_path: Path) -> None:
    count = 60_000
    tokenizer = opened(tmp_path, small(added_tokens=[added(95 + i, f"<|audio_{i}|>") for i in range(count)]))
    text = "<|audio_59999|><|audio_1|" * 2000
    assert sum(1 for _ in tokenizer.special.find(text)) == 2000
    assert tokenizer.encode(text, special=True).count(95 + 59_999) == 2000


JUNK = [None, True, -1, 10**30, 1.5, float("nan"), "", "x" * 300, "\x1b[2J", [], [None], {}, {"type": "Sequence"}, [["a", 1.0]]]


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(spot for key, item in list(inner)[:12] for spot in spots(item, (*path, key)))]


@pytest.mark.parametrize("make", [FAMILIES["qwen2, qwen3"][1], lambda: sentence_piece(True)], ids=["byte-level", "SentencePiece"])
def test_any_value_anywhere_gives_a_tokenizer_or_a_sentence(make: Callable, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    whole = make().to_str()
    places = spots(json.loads(whole))
    for _ in range(150):
        known = json.loads(whole)
        *way, last = chance.choice(places[1:])
        part = known
        for key in way:
            part = part[key]
        part[last] = chance.choice(JUNK)
        try:
            tokenizer = opened(tmp_path, known)
            assert isinstance(tokenizer.decode(tokenizer.encode("Hello <s> 12\n漢", special=True)), str)
        except FormatError as error:
            assert str(tmp_path) in str(error)


@pytest.mark.parametrize("make, pre", [(FAMILIES["qwen2, qwen3"][1], "qwen2"), (lambda: sentence_piece(True), True)],
                         ids=["byte-level", "SentencePiece"])
def test_any_metadata_gives_a_tokenizer_or_a_sentence(make: Callable, pre: object, seed: int) -> None:
    """Values of each key as a GGUF reader may give them: of any type; the token texts are checked before."""
    chance = random.Random(seed)
    whole = gguf_metadata(make(), **({"pre": pre} if isinstance(pre, str) else {"add_space_prefix": pre}))
    keys = [key for key in (*whole, "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces")
            if key not in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")]
    for _ in range(40):
        metadata = whole | {chance.choice(keys): chance.choice(JUNK)}
        try:
            assert isinstance(of_source(TokenizerSource(metadata=metadata), 4096).encode("Hello <s> 12", special=True), list)
        except FormatError as error:
            assert str(error).startswith("x.gguf: ")

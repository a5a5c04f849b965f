"""Folders without tokenizer.json: SentencePiece's tokenizer.model, vocab.json with merges.txt, files that are neither."""
from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_families import FAMILIES, gguf_metadata, of_source, sentence_piece, texts

from lora_bench.engine.base_file import open_base
from lora_bench.engine.sentence_piece_file import read_sentence_piece
from lora_bench.engine.tokenizer import Tokenizer
from lora_bench.engine.tokenizer_folder import folder_tokenizer
from lora_bench.engine.weights.files import FormatError


def varint(value: int) -> bytes:
    groups = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def message(fields: list[tuple[int, Any]]) -> bytes:
    """A protobuf message: integers, floats of four bytes, bytes."""
    data = b""
    for number, value in fields:
        kind, raw = (0, varint(value)) if isinstance(value, int) else (5, struct.pack("<f", value)) if isinstance(value, float) \
            else (2, varint(len(value)) + value)
        data += varint(number << 3 | kind) + raw
    return data


def model_file(metadata: dict[str, Any], kind: int = 2, prefix: bool = True, tidy: bool = False, charsmap: bytes = b"") -> bytes:
    """The tokenizer.model that says what the metadata says. `kind`: 1 unigram, 2 BPE, 3 words."""
    rows = zip(*(metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")), strict=True)
    pieces = [(1, message([(1, text.encode()), (2, float(score)), (3, sort)])) for text, score, sort in rows]
    return message([*pieces, (2, message([(1, b"corpus"), (3, kind), (40, 0)])),
                    (3, message([(1, b"identity"), (2, charsmap), (3, int(prefix)), (4, int(tidy)), (5, 1)]))])


def pieces_only(metadata: dict[str, Any]) -> dict[str, Any]:
    """Without the tokens that other files add and the rows without token."""
    size = len(metadata["tokenizer.ggml.tokens"])
    end = next(i for i in range(size) if metadata["tokenizer.ggml.token_type"][i] in (4, 5))
    return {key: value[:end] if isinstance(value, list) else value for key, value in metadata.items()}


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_tokenizer_model_equals_the_converted_one(prefix: bool, tmp_path: Path, seed: int) -> None:
    fast = sentence_piece(prefix)
    whole = gguf_metadata(fast, add_space_prefix=prefix)
    (tmp_path / "tokenizer.model").write_bytes(model_file(pieces_only(whole), prefix=prefix))
    listed = {str(i): {"content": token.content, "special": token.special} for i, token in fast.get_added_tokens_decoder().items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed, "bos_token": "<s>", "eos_token": "</s>"}))
    source, added = folder_tokenizer(tmp_path, {}, 4096)
    assert (source.bos, source.eos, source.path) == (1, 2, tmp_path / "tokenizer.model")
    assert added["<think>"] == (fast.token_to_id("<think>"), False)
    tokenizer = of_source(source, 4096)
    assert tokenizer.add_bos is True
    for special in (True, False):
        fast.encode_special_tokens = not special
        for text in texts(seed):
            ids = fast.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, special) == ids and tokenizer.decode(ids) == fast.decode(ids), text


def test_tokens_that_take_the_space_after_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file(pieces_only(gguf_metadata(sentence_piece(True)))))
    end = {"content": "<|end|>", "special": True, "rstrip": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"2000": end}}))
    tokenizer = of_source(folder_tokenizer(tmp_path, {}, 4096)[0], 4096)
    assert tokenizer.encode("<|end|>\n<|end|>", special=True) == [2000, 2000] and tokenizer.eats_space[2000] == (False, True)
    assert tokenizer.decode([1500]) == "", "ids between the pieces and the added tokens have no text"


def unigram_metadata() -> dict[str, Any]:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁", -3.0, 1), ("▁the", -1.0, 1), ("▁t", -4.0, 1), ("he", -2.5, 1),
              ("h", -5.0, 1),
              ("e", -4.5, 1), ("t", -4.2, 1), ("s", -4.1, 1), ("▁these", -9.9, 1), ("<sep>", -20.0, 4)]
    tokens, scores, kinds = map(list, zip(*pieces, strict=True))
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds}


@pytest.mark.parametrize("text, pieces", [
    ("the these", ["▁the", "▁the", "s", "e"]), ("  the   t ", ["▁the", "▁t"]), ("the<sep>the", ["▁the", "<sep>", "▁the"]), ("", []),
    ("x", ["▁", "<unk>"]),
])
def test_unigram_takes_the_highest_sum(text: str, pieces: list[str], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file(unigram_metadata(), kind=1, tidy=True))
    tokenizer = of_source(folder_tokenizer(tmp_path, {}, 13)[0], 13)
    assert [tokenizer.spelling(i) for i in tokenizer.encode(text, special=True)] == pieces


def test_vocab_and_merges_of_qwen(tmp_path: Path, seed: int) -> None:
    fast = FAMILIES["qwen2, qwen3"][1]()
    model = json.loads(fast.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    listed = {str(i): {"content": token.content, "special": token.special} for i, token in fast.get_added_tokens_decoder().items()}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": listed}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = of_source(folder_tokenizer(tmp_path, {}, 4096)[0], 4096)
    for text in texts(seed):
        ids = fast.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=True) == ids and tokenizer.decode(ids) == fast.decode(ids), text
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(FormatError, match="has no tokenizer.json, which is needed"):
        folder_tokenizer(tmp_path, {}, 4096)


def test_a_base_with_only_tokenizer_model(tiny_folder: Callable) -> None:
    folder = tiny_folder(files={"tokenizer.json": None})
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer.model").write_bytes(model_file(unigram_metadata(), kind=1))
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 50}))
    base = open_base(folder)
    tokenizer = Tokenizer(base)
    assert tokenizer.path == folder / "tokenizer.model" and tokenizer.bos == 1 and tokenizer.encode("the", special=True) == [4]
    assert base.tokenizer.rowless == ("<pad>",) and tokenizer.id_of("<pad>") is None and "'<pad>'" in base.notes[0]


def test_tokens_that_only_the_settings_list(tmp_path: Path) -> None:
    """tokenizer.json from before tokens were added, tokenizer_config.json from after."""
    fast = FAMILIES["gpt-2"][1]()
    fast.save(str(tmp_path / "tokenizer.json"))
    size = fast.get_vocab_size()

    def listed(tokens: dict[str, str]) -> Tokenizer:
        rows = {number: {"content": text, "special": True} for number, text in tokens.items()}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": rows, "eos_token": "<tool>"}))
        source, added = folder_tokenizer(tmp_path, {}, size + 2)
        assert source.eos == source.more["<tool>"][0] == added["<tool>"][0]
        return of_source(source, size + 2)

    tokenizer = listed({"1": "<s>", str(size + 1): "<tool>", str(size + 5): "[PAD]"})
    assert tokenizer.encode("a<tool>", special=True)[-1] == size + 1 and tokenizer.vocab_size == size + 2
    assert tokenizer.encode("[PAD]", special=True) == fast.encode("[PAD]").ids, "a token without a row stays text"
    with pytest.raises(FormatError, match="names '<tool>' as token 3, which is another one in tokenizer.json"):
        listed({"3": "<tool>"})


@pytest.mark.parametrize("data, words", [
    (b"", "no SentencePiece model of the kind"), (b"\xff" * 100, "or a damaged one"), (b"\x0a\xff\xff\xff\xff\x0f", "or a damaged one"),
    (model_file(unigram_metadata(), kind=3), "of the kind BPE or unigram"),
    (b"version https://git-lfs.github.com/spec/v1\n", "SentencePiece"),
    (model_file(unigram_metadata())[:-7], "or a damaged one"), (message([(1, 5)]), "or a damaged one"),
    (message([(1, message([(1, 7)]))]), "or a damaged one"),
])
def test_files_that_are_no_model(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=f"tokenizer.model: .*{words}"):
        read_sentence_piece(path)


def test_damaged_models_give_a_tokenizer_or_a_sentence(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    whole = model_file(unigram_metadata(), kind=1, tidy=True)
    path = tmp_path / "tokenizer.model"
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[:chance.choice([len(data), chance.randrange(len(data))])])
        try:
            assert isinstance(of_source(folder_tokenizer(tmp_path, {}, 13)[0], 13).encode("the <sep> x", special=True), list)
        except FormatError as error:
            assert str(path) in str(error)

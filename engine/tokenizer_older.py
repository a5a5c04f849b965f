"""Folders without tokenizer.json: SentencePiece's tokenizer.model, or vocab.json and merges.txt. No torch, no tokenizers."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base_parts import token_id
from .sentence_piece_file import read_sentence_piece
from .tokenizer_sizes import check_added
from .weights.files import FormatError, present, read_bounded, read_json_object, show

_ANY_ID = 1 << 31
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_MERGES_BYTES = 64 << 20
_PRE_OF_CLASS = {"Qwen2Tokenizer": "qwen2", "Qwen2TokenizerFast": "qwen2"}
"""tokenizer_class of tokenizer_config.json -> how it cuts text; GPT2Tokenizer is not here:
families that cut digits apart use its name too"""


@dataclass(frozen=True)
class OlderTokenizer:
    """The tokenizer of `path` as GGUF metadata would say it."""

    path: Path
    metadata: dict[str, Any]
    added: dict[str, tuple[int, bool]]
    """content -> (id, special) of the tokens that other files add, those from `vocab` on (which `metadata` has not) too"""
    strips: dict[int, tuple[bool, bool]]


def older_tokenizer(folder: Path, settings: dict[str, Any], vocab: int) -> OlderTokenizer:
    """Raises FormatError when the folder has no tokenizer whose rules are known, OSError."""
    path = folder / "tokenizer.model"
    if present(path):
        metadata = read_sentence_piece(path)
    else:
        path = folder / "vocab.json"
        pre = _PRE_OF_CLASS.get(str(settings.get("tokenizer_class")))
        if pre is None or not present(path) or not present(folder / "merges.txt"):
            raise FormatError(f"{folder}: has no tokenizer.json, which is needed; convert the tokenizer with transformers "
                              "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) or use a GGUF of the model")
        metadata = _vocab_and_merges(folder, pre, vocab)
    return _with_added(path, metadata, listed_tokens(folder, settings)[1], vocab)


def _vocab_and_merges(folder: Path, pre: str, vocab: int) -> dict[str, Any]:
    path = folder / "vocab.json"
    texts: dict[int, str] = {}
    for text, number in read_json_object(path).items():
        texts[_id(number, text, vocab, path)] = text
    lines = read_bounded(folder / "merges.txt", _MERGES_BYTES).decode("utf-8", "replace").split("\n")
    size = max(texts, default=-1) + 1
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [1 if i in texts else _UNUSED for i in range(size)],
        "tokenizer.ggml.merges": [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")],
    }


def listed_tokens(folder: Path, settings: dict[str, Any]) -> tuple[Path, dict[int, dict[str, Any]]]:
    """The file and its added tokens, id -> token as tokenizer_config.json has it; added_tokens.json names those of the oldest folders.

    The ids may be beyond any vocabulary.
    """
    path = folder / "tokenizer_config.json"
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        tokens = {int(key) if key.isdecimal() and len(key) < 10 else -1: token for key, token in listed.items()}
    else:
        path = folder / "added_tokens.json"
        names = read_json_object(path) if present(path) else {}
        tokens = {number: {"content": text, "special": True} for text, number in names.items() if type(number) is int}
    for number, token in tokens.items():
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not token["content"]:
            raise FormatError(f"{path}: the added token {number} has no content; download the file again")
        _id(number, token["content"], _ANY_ID, path)
    check_added([token["content"] for token in tokens.values()], path)
    return path, tokens


def _with_added(path: Path, metadata: dict[str, Any], listed: dict[int, dict[str, Any]], vocab: int) -> OlderTokenizer:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = {number: token for number, token in listed.items() if number < vocab}
    for number in range(len(tokens), max(added, default=-1) + 1):
        tokens.append(f"[PAD{number}]")
        kinds.append(_UNUSED)
        metadata.get("tokenizer.ggml.scores", []).append(0.0)
    for number, token in added.items():
        tokens[number], kinds[number] = token["content"], _CONTROL if token.get("special") is True else _USER_DEFINED
    return OlderTokenizer(
        path, metadata, {token["content"]: (number, token.get("special") is True) for number, token in listed.items()},
        {number: (token.get("lstrip") is True, token.get("rstrip") is True) for number, token in added.items()},
    )


def _id(number: Any, text: str, vocab: int, path: Path) -> int:
    found = token_id(number, vocab, f"the id of token {show(text)}", path)
    if found is None:
        raise FormatError(f"{path}: token {show(text)} has no id; download the file again")
    return found

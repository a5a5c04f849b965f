"""Reading tokenizer.model, SentencePiece's own file: a protobuf message ModelProto. Bounded; no torch, no protobuf.

Format: sentencepiece_model.proto of google/sentencepiece, in the protobuf wire format (protobuf.dev, "Encoding").
"""
from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .weights.files import FormatError, read_bounded

MAX_BYTES = 64 << 20
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _UNIGRAM, _BPE = 3, 1, 2
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE = 2, 3, 4, 5
_USER_DEFINED = 4
_MODELS = {_UNIGRAM: "t5", _BPE: "llama"}
_DAMAGED = "is no SentencePiece model, or a damaged one; download it again"

Field = tuple[int, int | float | bytes]


def read_sentence_piece(path: Path) -> dict[str, Any]:
    """The file as the metadata of a GGUF file would say it (tokenizer.ggml.*). Raises FormatError, OSError."""
    pieces: list[tuple[str, float, int]] = []
    parts: dict[int, dict[int, Any]] = {}
    for number, value in _fields(read_bounded(path, MAX_BYTES), path):
        if number == _PIECES:
            pieces.append(_piece(dict(_fields(value, path)), path))
        elif number in (_TRAINER, _NORMALIZER):
            parts[number] = dict(_fields(value, path))
    normalizer = parts.get(_NORMALIZER, {})
    model = _MODELS.get(parts.get(_TRAINER, {}).get(_MODEL_TYPE, _UNIGRAM))
    charsmap = normalizer.get(_CHARSMAP, b"")
    if not pieces or model is None or not normalizer.get(_ESCAPE, 1) or not isinstance(charsmap, bytes):
        raise FormatError(f"{path}: is no SentencePiece model of the kind BPE or unigram; give the folder its tokenizer.json")
    tokens, scores, kinds = map(list, zip(*pieces, strict=True))
    return {
        "tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(_DUMMY_PREFIX, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normalizer.get(_EXTRA_SPACES, 1)),
        "tokenizer.ggml.precompiled_charsmap": charsmap,
    }


def _piece(fields: dict[int, Any], path: Path) -> tuple[str, float, int]:
    """(text, score, type). Pieces that the user defined are matched in text as it is written, so theirs have plain spaces."""
    text, score, kind = fields.get(1, b""), fields.get(2, 0.0), fields.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, float) or not isinstance(kind, int):
        raise FormatError(f"{path}: {_DAMAGED}")
    spelled = text.decode("utf-8", "replace")
    return spelled.replace("▁", " ") if kind == _USER_DEFINED else spelled, score, kind


def _fields(data: Any, path: Path) -> Iterator[Field]:
    """(number, value) of each field of a message, in its order; embedded messages and text as bytes."""
    if not isinstance(data, bytes):
        raise FormatError(f"{path}: {_DAMAGED}")
    position = 0
    try:
        while position < len(data):
            key, position = _varint(data, position)
            match key & 7:
                case 0:
                    value, position = _varint(data, position)
                case 2:
                    size, position = _varint(data, position)
                    value, position = data[position:position + size], position + size
                case 5:
                    (value,), position = struct.unpack_from("<f", data, position), position + 4
                case 1:
                    (value,), position = struct.unpack_from("<d", data, position), position + 8
                case _:
                    raise IndexError
            if position > len(data):
                raise IndexError
            yield key >> 3, value
    except (IndexError, struct.error):
        raise FormatError(f"{path}: {_DAMAGED}") from None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer in groups of seven bits, the lowest first; and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise IndexError

"""What one token stands for, in bytes: byte-level alphabets, SentencePiece's spaces and byte tokens."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Fast

from ..weights.files import FormatError, show
from .sentence_piece import SPACE

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
_ORDER = ("ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip")


@dataclass(frozen=True)
class Decoding:
    """How tokens become text."""

    byte_level: bool
    byte_tokens: bool
    """<0x41> is the byte 41"""
    spaces: bool
    """U+2581 is a space"""
    strips_space: bool
    """the space that SentencePiece puts before the first word is no part of the text"""

    def of(self, text: str) -> bytes:
        """The bytes of a token of the vocabulary."""
        if self.byte_level:
            return _from_byte_level(text)
        byte = _BYTE_TOKEN.fullmatch(text) if self.byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else self.of_added(text)

    def of_added(self, text: str) -> bytes:
        """The bytes of an added token: as it is spelled."""
        return (text.replace(SPACE, " ") if self.spaces else text).encode("utf-8", "replace")


def decoding_of(fast: Fast, where: object) -> Decoding:
    """Raises FormatError for a decoder that is not known here: its text would come out wrong."""
    if fast.decoder is None:
        raise FormatError(f"{where}: has no decoder, so how tokens become text is not known; download the file again")
    decoder: dict[str, Any] = json.loads(fast.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    for step in steps:
        if not _known(step):
            raise FormatError(f"{where}: decodes with {step['type']}, which is not supported; byte-level and SentencePiece tokenizers are")
    if sorted(kinds, key=_ORDER.index) != kinds or len(set(kinds)) != len(kinds) or "ByteLevel" in kinds and len(kinds) > 1:
        raise FormatError(f"{where}: decodes with {show(', '.join(kinds))} in this order, which is not supported; "
                          "byte-level and SentencePiece tokenizers are")
    return Decoding(
        byte_level="ByteLevel" in kinds, byte_tokens="ByteFallback" in kinds, spaces="Replace" in kinds or "Metaspace" in kinds,
        strips_space=any(step["type"] == "Strip" and step["start"] or step["type"] == "Metaspace" and step["prepend_scheme"] != "never"
                         for step in steps),
    )


def _known(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel" | "ByteFallback" | "Fuse":
            return True
        case "Replace":
            return step == _SPACES
        case "Metaspace":
            return step.get("replacement") == SPACE
        case "Strip":
            return step.get("content") == " " and step.get("start") in (0, 1) and step.get("stop") == 0
    return False


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in text)
    except KeyError:
        return text.encode("utf-8", "replace")

"""The header of a GGUF file: metadata and where the tensors lie.

Every number that the file states is checked against the bytes that are really there before
anything is allocated or repeated by it. No torch, no numpy.
"""
from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .entry import BLOCKS, MAX_TENSORS, TensorEntry
from .files import FormatError, open_regular, show

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20
"""four times the largest vocabulary in use; what a header may take before the tensors begin"""
MAX_KEY_BYTES = 65535
MAX_PAIRS = 1 << 16
MAX_ITEMS = 1 << 24
"""of one array"""
MAX_DIMS = 4

Value = int | float | bool | str | Sequence[int] | Sequence[float] | Sequence[str]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}
"""number in the file -> tensor type"""
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
"""types that ggml gave up, whose files are still about"""


@dataclass(frozen=True)
class GgufHeader:
    """`tensors` by their names in the file; arrays of numbers in `metadata` are array.array, arrays of text lists."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorEntry]
    file_bytes: int


def read_header(path: Path) -> GgufHeader:
    """Metadata and tensor places of a GGUF file of version 2 or 3, of either byte order.

    Raises FormatError for a file that is none or contradicts itself, OSError when it cannot be read.
    """
    with open_regular(path) as stream:
        reader = _Reader(stream, path)
        version, tensor_count, pair_count = _preamble(reader)
        metadata = _metadata(reader, pair_count)
        places = [_tensor_place(reader) for _ in range(reader.count(tensor_count, 32, "tensors", MAX_TENSORS))]
        alignment = _alignment(metadata, path)
        data_start = -(-reader.position // alignment) * alignment
        tensors = _entries(places, data_start, alignment, reader)
        return GgufHeader(path, version, metadata, tensors, reader.size)


class _Reader:
    """Reads on, never past the end of the file nor past the header limit."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.stream, self.path = stream, path
        self.size = os.fstat(stream.fileno()).st_size
        self.position = 0
        self.order = "<"
        """of the bytes of a number, as struct writes it; the version in the file tells"""

    def take(self, count: int, what: str) -> bytes:
        left = self.size - self.position
        if count > left:
            raise FormatError(f"{self.path}: is truncated or corrupt: {what} wants {count:,} bytes and the file ends after {left:,} more; "
                              "download it again")
        if self.position + count > MAX_HEADER_BYTES:
            raise FormatError(f"{self.path}: {what} takes the header past {MAX_HEADER_BYTES:,} bytes, more than any model's; "
                              "the file is corrupt")
        data = self.stream.read(count)
        if len(data) != count:
            raise FormatError(f"{self.path}: got shorter while {what} was read; close what writes to it and open it again")
        self.position += count
        return data

    def number(self, code: str, what: str) -> int | float | bool:
        return struct.unpack(self.order + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, count: int, least_bytes: int, what: str, limit: int = MAX_ITEMS) -> int:
        """`count`, refused when so many items of at least `least_bytes` cannot be in the rest of the file, or no model has as many."""
        left = self.size - self.position
        if count * least_bytes > left:
            raise FormatError(f"{self.path}: states {count:,} {what} but only {left:,} bytes follow; the file is truncated or corrupt, "
                              "download it again")
        if count > limit:
            raise FormatError(f"{self.path}: states {count:,} {what}, more than the {limit:,} that are read; the file is corrupt")
        return count

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = int(self.number("Q", f"the length of {what}"))
        if length > limit:
            raise FormatError(f"{self.path}: {what} states a length of {length:,} bytes, over the limit of {limit:,}; the file is corrupt")
        return self.take(length, what).decode("utf-8", errors="replace")


def _preamble(reader: _Reader) -> tuple[int, int, int]:
    magic = reader.take(min(4, reader.size), "the magic")
    if magic != MAGIC:
        old = magic[::-1] in (b"ggml", b"ggjt", b"ggmf", b"ggla")
        hint = "is an old GGML/GGJT file; convert it to GGUF" if old else "is not a GGUF file"
        raise FormatError(f"{reader.path}: {hint} (magic {show(magic.decode('latin-1'))} where 'GGUF' is expected)")
    raw = reader.take(4, "the version in the header")
    if raw[:2] == b"\0\0":  # no version is that high: its small number stands at the other end
        reader.order = ">"
    version = struct.unpack(reader.order + "I", raw)[0]
    if version not in VERSIONS:
        raise FormatError(f"{reader.path}: is GGUF version {version}; versions 2 and 3 are supported, convert the model again")
    return version, int(reader.number("Q", "the tensor count in the header")), int(reader.number("Q", "the pair count in the header"))


def _metadata(reader: _Reader, pair_count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(reader.count(pair_count, 13, "metadata pairs", MAX_PAIRS)):
        key = reader.text("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise FormatError(f"{reader.path}: metadata key {show(key)} occurs twice; the file is corrupt")
        metadata[key] = _value(reader, int(reader.number("I", f"the type of {show(key)}")), key)
    return metadata


def _value(reader: _Reader, kind: int, key: str) -> Value:
    what = f"metadata {show(key)}"
    if kind == _STRING:
        return reader.text(what)
    if kind != _ARRAY:
        return reader.number(_code(reader, kind, key), what)
    item = int(reader.number("I", f"the item type of {what}"))
    length = int(reader.number("Q", f"the array length of {what}"))
    if item == _ARRAY:
        raise FormatError(f"{reader.path}: {what} is an array of arrays, which no model needs; the file is corrupt")
    if item == _STRING:
        return [reader.text(what) for _ in range(reader.count(length, 8, f"strings in the array of {what}"))]
    code = _code(reader, item, key)
    width = struct.calcsize("<" + code)
    values = array("B" if code == "?" else code)
    values.frombytes(reader.take(reader.count(length, width, f"items in the array of {what}") * width, what))
    if (reader.order == ">") != (sys.byteorder == "big"):
        values.byteswap()
    return values


def _code(reader: _Reader, kind: int, key: str) -> str:
    if kind not in _SCALARS:
        raise FormatError(f"{reader.path}: metadata {show(key)} has the unknown value type {kind}; "
                          "the file is corrupt or newer than this reader")
    return _SCALARS[kind]


def _tensor_place(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """name, shape in torch order, type number, offset from the data section"""
    name = reader.text("a tensor's name", MAX_KEY_BYTES)
    dims = int(reader.number("I", f"the dimension count of tensor {show(name)}"))
    if not 1 <= dims <= MAX_DIMS:
        raise FormatError(f"{reader.path}: tensor {show(name)} states {dims:,} dimensions, 1 to {MAX_DIMS} are possible; "
                          "the file is corrupt")
    shape = struct.unpack(f"{reader.order}{dims}Q", reader.take(8 * dims, f"the shape of tensor {show(name)}"))
    kind = int(reader.number("I", f"the type of tensor {show(name)}"))
    return name, shape[::-1], kind, int(reader.number("Q", f"the offset of tensor {show(name)}"))


def _alignment(metadata: dict[str, Value], path: Path) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise FormatError(f"{path}: general.alignment is {show(alignment)}, a power of two is expected; the file is corrupt")
    return alignment


def _entries(
    places: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int, reader: _Reader,
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in places:
        if name in entries:
            raise FormatError(f"{reader.path}: tensor {show(name)} occurs twice; the file is corrupt")
        if offset % alignment:
            raise FormatError(f"{reader.path}: tensor {show(name)} lies at offset {offset:,}, not a multiple of the alignment {alignment}; "
                              "the file is corrupt")
        type_name, nbytes = _size(name, shape, kind, reader.path)
        if data_start + offset + nbytes > reader.size:
            raise FormatError(f"{reader.path}: is truncated: tensor {show(name)} ends at byte {data_start + offset + nbytes:,}, beyond the "
                              f"end of the file at {reader.size:,}; download it again")
        entries[name] = TensorEntry(name, type_name, shape, reader.path, data_start + offset, nbytes, reader.order == ">")
    refuse_overlap(entries, reader.path)
    return entries


def _size(name: str, shape: tuple[int, ...], kind: int, path: Path) -> tuple[str, int]:
    if kind in _REMOVED:
        raise FormatError(f"{path}: tensor {show(name)} is of type {_REMOVED[kind]}, which ggml gave up; "
                          "quantise the model again, to Q4_0 for one")
    if kind not in TYPES:
        raise FormatError(f"{path}: tensor {show(name)} has the unknown type {kind}; the file is corrupt or newer than this reader")
    type_name = TYPES[kind]
    elements, block_bytes = BLOCKS[type_name]
    total = math.prod(shape)
    if total == 0 or total >= 1 << 63:
        raise FormatError(f"{path}: tensor {show(name)} states the shape {list(shape)}, which no tensor can have; the file is corrupt")
    if shape[-1] % elements:
        raise FormatError(f"{path}: tensor {show(name)} has rows of {shape[-1]} elements, "
                          f"not a multiple of the {elements} of a {type_name} block")
    return type_name, total // elements * block_bytes


def refuse_overlap(entries: dict[str, TensorEntry], path: Path) -> None:
    """Raises FormatError naming two tensors of one file that share bytes."""
    ordered = sorted(entries.values(), key=lambda entry: entry.offset)
    for first, second in zip(ordered, ordered[1:], strict=False):
        if first.offset + first.nbytes > second.offset:
            raise FormatError(f"{path}: tensors {show(first.name)} and {show(second.name)} overlap in the file; it is corrupt")

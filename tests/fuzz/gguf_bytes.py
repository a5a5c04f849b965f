"""GGUF files as bytes: a writer, the places of their fields, and changes that know them."""
from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .mutations import NASTY, NUMBERS, TEXTS, blind

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCKS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "BF16": (30, 1, 2), "MXFP4": (39, 32, 17),
}
"""type -> (number in the file, elements of a block, bytes of a block)"""

Tensor = tuple[str, tuple[int, ...], bytes]
"""type, shape in torch order, data"""


def write(pairs: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int = 3, order: str = "<", alignment: int = 32) -> bytes:
    """A whole file. Values are written as the nearest type; data are taken as they are."""
    head = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(pairs))
    body = b"".join(_text(key, order) + _typed(value, order) for key, value in pairs.items())
    offset, data = 0, b""
    for name, (kind, shape, content) in tensors.items():
        body += _text(name, order) + struct.pack(f"{order}I{len(shape)}QIQ", len(shape), *reversed(shape), BLOCKS[kind][0], offset)
        padded = content + bytes(-len(content) % alignment)
        offset, data = offset + len(padded), data + padded
    whole = head + body
    return whole + bytes(-len(whole) % alignment) + data


def noise(kind: str, shape: tuple[int, ...], random: Random) -> Tensor:
    """A tensor of random bytes."""
    _, elements, size = BLOCKS[kind]
    return kind, shape, random.randbytes(math.prod(shape) // elements * size)


def _text(text: str | bytes, order: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack(order + "Q", len(data)) + data


def _typed(value: Any, order: str) -> bytes:
    kind = _kind(value)
    return struct.pack(order + "I", kind) + _value(value, kind, order)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if 0 <= value < 1 << 32 else 10 if value >= 0 else 11
    return 6 if isinstance(value, float) else STRING if isinstance(value, (str, bytes)) else ARRAY


def _value(value: Any, kind: int, order: str) -> bytes:
    if kind == STRING:
        return _text(value, order)
    if kind != ARRAY:
        return struct.pack(order + SCALARS[kind], value)
    item = (5 if type(value[0]) is int else _kind(value[0])) if value else 4
    return struct.pack(order + "IQ", item, len(value)) + b"".join(_value(entry, item, order) for entry in value)


@dataclass
class Layout:
    """Where things are in a file; what comes after the first lie is left out."""

    order: str = "<"
    numbers: list[tuple[int, int]] = field(default_factory=list)
    """(offset, width) of counts, lengths, types, dimensions, offsets and values"""
    pairs: list[tuple[int, int]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of metadata pairs and of tensor descriptions"""


def layout(data: bytes) -> Layout:
    """The layout of a file that is good or nearly so."""
    found = Layout(">" if data[4:7] == b"\0\0\0" else "<", [(4, 4), (8, 8), (16, 8)])
    try:
        end = 24
        for _ in range(min(_get(data, 16, 8, found.order), 10_000)):
            start, end = end, _skip_value(data, _skip_text(data, end, found), found)
            found.pairs.append((start, end))
        for _ in range(min(_get(data, 8, 8, found.order), 10_000)):
            start, end = end, _skip_place(data, end, found)
            found.places.append((start, end))
    except (ValueError, KeyError):
        pass
    return found


def _get(data: bytes, offset: int, width: int, order: str) -> int:
    if offset + width > len(data):
        raise ValueError
    return int.from_bytes(data[offset:offset + width], "little" if order == "<" else "big")


def _skip_text(data: bytes, offset: int, found: Layout) -> int:
    found.numbers.append((offset, 8))
    end = offset + 8 + _get(data, offset, 8, found.order)
    if end > len(data):
        raise ValueError
    return end


def _skip_value(data: bytes, offset: int, found: Layout) -> int:
    kind = _get(data, offset, 4, found.order)
    found.numbers.append((offset, 4))
    offset += 4
    if kind == STRING:
        return _skip_text(data, offset, found)
    if kind != ARRAY:
        found.numbers.append((offset, struct.calcsize(SCALARS[kind])))
        return offset + struct.calcsize(SCALARS[kind])
    item, count = _get(data, offset, 4, found.order), _get(data, offset + 4, 8, found.order)
    found.numbers += [(offset, 4), (offset + 4, 8)]
    offset += 12
    if item != STRING:
        return offset + count * struct.calcsize(SCALARS[item])
    for _ in range(min(count, 100_000)):
        offset = _skip_text(data, offset, found)
    return offset


def _skip_place(data: bytes, offset: int, found: Layout) -> int:
    offset = _skip_text(data, offset, found)
    dims = _get(data, offset, 4, found.order)
    found.numbers += [(offset, 4), *((offset + 4 + 8 * i, 8) for i in range(min(dims, 8))), (offset + 4 + 8 * dims, 4),
                      (offset + 8 + 8 * dims, 8)]
    return offset + 16 + 8 * dims


def mutate(data: bytes, other: bytes, random: Random, keys: Sequence[str]) -> bytes:
    """`data` with a lie in a field, or with pairs and tensors taken away, doubled, exchanged or made up.

    `keys` mean something to readers.
    """
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        chance = random.random()
        if chance < 0.35:
            data = _lie(data, random)
        elif chance < 0.55:
            data = _put_pair(data, random.choice(keys), random)
        elif chance < 0.8:
            data = _move(data, other, random)
        else:
            data = blind(data, other, random)
    return data


def _lie(data: bytes, random: Random) -> bytes:
    found = layout(data)
    offset, width = random.choice(found.numbers)
    number = _get(data, offset, width, found.order) if offset + width <= len(data) else 0
    value = random.choice((random.choice(NASTY), random.getrandbits(64), number + 1, number - 1, number * 2, random.randrange(48)))
    value &= (1 << 8 * width) - 1
    return data[:offset] + value.to_bytes(width, "little" if found.order == "<" else "big") + data[offset + width:]


def _put_pair(data: bytes, key: str, random: Random) -> bytes:
    """The pair `key` with any value, in the place of the one there or as a new one."""
    found = layout(data)
    encoded = key.encode()
    pair = _text(key, found.order) + _random_value(found.order, random)
    for start, end in found.pairs:
        if data[start + 8:start + 8 + len(encoded)] == encoded:
            return data[:start] + pair + data[end:]
    return _counted(data[:24] + pair + data[24:], 16, 1, found.order)


def _random_value(order: str, random: Random) -> bytes:
    kind = random.choice((STRING, ARRAY, *SCALARS))
    if kind == STRING:
        return struct.pack(order + "I", kind) + _text(random.choice(TEXTS), order)
    if kind != ARRAY:
        return struct.pack(order + "I", kind) + _scalar(kind, order, random)
    item, count = random.choice((STRING, *SCALARS)), random.choice((0, 1, 2, 50, 3000))
    content = b"".join(_text(random.choice(TEXTS[:20]), order) if item == STRING else _scalar(item, order, random) for _ in range(count))
    return struct.pack(order + "IIQ", kind, item, count) + content


def _scalar(kind: int, order: str, random: Random) -> bytes:
    if SCALARS[kind] in "fd":
        number = float(random.choice(NUMBERS[:-1]) if random.random() < 0.9 else "nan")
        return struct.pack(order + SCALARS[kind], number if abs(number) < 3e38 or math.isinf(number) else 0.0)
    width = struct.calcsize(SCALARS[kind])
    return (random.choice(NASTY) & (1 << 8 * width) - 1).to_bytes(width, "little" if order == "<" else "big")


def _move(data: bytes, other: bytes, random: Random) -> bytes:
    """A pair or tensor description taken away, doubled, or brought from `other`; counts follow most of the time."""
    found = layout(data)
    pairs = random.random() < 0.5
    spans, count_at = (found.pairs, 16) if pairs else (found.places, 8)
    if not spans:
        return data
    start, end = random.choice(spans)
    chance = random.random()
    if chance < 0.4:
        return _counted(data[:start] + data[end:], count_at, -(random.random() < 0.8), found.order)
    piece = data[start:end]
    if chance < 0.8 and (others := (layout(other).pairs if pairs else layout(other).places)):
        first, last = random.choice(others)
        piece = other[first:last]
    if random.random() < 0.5:
        return data[:start] + piece + data[end:]
    return _counted(data[:start] + piece + data[start:], count_at, random.random() < 0.8, found.order)


def _counted(data: bytes, offset: int, change: int, order: str) -> bytes:
    count = _get(data, offset, 8, order) + change & (1 << 64) - 1
    return data[:offset] + count.to_bytes(8, "little" if order == "<" else "big") + data[offset + 8:]

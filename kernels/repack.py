"""Packed rows in another order of their bits, of the same size to +3 %: as the tensor cores of a GPU take them.

A row is cut into super-blocks of 256 numbers. Of the codes q of a super-block (4, 5, 6 or 8 bits) those are neighbours in a word that
follow each other `group` numbers apart, so that one step of unpacking makes `group` neighbours, which share one scale and meet a
contiguous piece of x. Words lie in tiles of 32 rows by one super-block; scales lie row beside row. A number is
scale * (q - zero) + minimum, computed in fp32 as ggml does.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .packed import PackedRows
from .quant import QUANT_TYPES
from .quant.fields import unpack
from .quant.super_blocks import six_bit_pairs

SUPER = 256
TILE_ROWS = 32
ROW_MULTIPLE = 64
"""rows are filled up to this many with zeros"""
CHUNK_ROWS = 2048
"""that are brought into the new order at once"""


@dataclass(frozen=True, slots=True)
class CodeOrder:
    """How a type lies here."""

    bits: int
    group: int
    scales: Literal["half", "six", "eight"]
    """fp16 each; 6 bits unsigned times an fp16 of the super-block; 8 bits signed times the same"""
    minima: bool
    """of the same kind as the scales; those of "six" are subtracted"""
    zero: int = 0

    @property
    def words(self) -> int:
        """int32 of the codes of a super-block, without `high` bytes"""
        return 64 if self.bits == 8 else 32

    @property
    def high(self) -> int:
        """bytes beside each word"""
        return {5: 1, 6: 2}.get(self.bits, 0)

    @property
    def scale_words(self) -> int:
        """int32 of the scales of a super-block, and as many of its minima"""
        return {"half": 4, "six": 2, "eight": 4}[self.scales]

    @property
    def super_words(self) -> int:
        return 0 if self.scales == "half" else 1

    @property
    def row_words(self) -> int:
        """int32 of a row's super-block in all"""
        return self.words + 8 * self.high + self.scale_words * (1 + self.minima) + self.super_words


ORDERS = {
    "Q4_0": CodeOrder(4, 32, "half", False, 8), "Q4_1": CodeOrder(4, 32, "half", True),
    "Q5_0": CodeOrder(5, 32, "half", False, 16), "Q5_1": CodeOrder(5, 32, "half", True),
    "Q8_0": CodeOrder(8, 32, "half", False),
    "Q4_K": CodeOrder(4, 32, "six", True), "Q5_K": CodeOrder(5, 32, "six", True), "Q6_K": CodeOrder(6, 16, "eight", False, 32),
}
PIECES: dict[int, tuple[tuple[tuple[int, int, int], ...], ...]] = {
    4: tuple(((lane, shift, 15),) for lane in (0, 1) for shift in (0, 4, 8, 12)),
    5: (*(((lane, shift, 31),) for lane in (0, 1) for shift in (0, 5, 10)), ((2, 0, 31),), ((0, 15, 1), (1, 14, 2), (2, 3, 28))),
    6: (*(((lane, shift, 63),) for lane in (0, 1, 2) for shift in (0, 6)), ((0, 12, 15), (2, 8, 48)), ((1, 12, 15), (2, 10, 48))),
}
"""Codes of a neighbour: code = OR over its pieces of (lane >> shift) & mask. Lanes 0 and 1 have 16 bits, 2 are its high bytes.
Two neighbours have two words: one of their lanes 0, one of their lanes 1."""


@dataclass(frozen=True, slots=True)
class RepackedRows:
    """Rows of one type; `data` int32 [words]: codes, high bytes, scales, minima, scales of super-blocks."""

    type: str
    rows: int
    d_in: int
    data: Tensor

    @property
    def order(self) -> CodeOrder:
        return ORDERS[self.type]

    @property
    def padded(self) -> int:
        return -(-self.rows // ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def supers(self) -> int:
        return -(-self.d_in // SUPER)

    def fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Views: codes [tiles, supers, 32, words], high bytes [.., 32], scales and minima [supers, n, padded], those of super-blocks."""
        order, cells = self.order, self.supers * self.padded
        sizes = (order.words, 8 * order.high, order.scale_words, order.scale_words * order.minima, order.super_words)
        codes, high, scales, minima, supers = self.data.split([cells * size for size in sizes])
        tiles = (self.padded // TILE_ROWS, self.supers, TILE_ROWS)
        planes = {0: high, 1: high.view(torch.uint8), 2: high.view(torch.int16)}[order.high]
        return (codes.view(*tiles, order.words), planes.view(*tiles, 32 if order.high else 0), scales.view(self.supers, -1, self.padded),
                minima.view(self.supers, -1, self.padded), supers.view(-1, self.padded))

    def numbers(self, ids: Tensor) -> Tensor:
        """Semantics: y[t] = row ids[t], fp32 [n, d_in]; bit for bit what `dequantize` makes of the packed row."""
        codes, high, scales, minima, supers = self.fields()
        order, tile, place = self.order, ids // TILE_ROWS, ids % TILE_ROWS
        q = _codes(codes[tile, :, place], high[tile, :, place], order)
        supers = _dense(supers[:, ids].T)
        q = q.float().sub_(order.zero).view(*q.shape[:2], -1, order.group)
        q.mul_(_scales(_dense(scales[:, :, ids].permute(2, 0, 1)), supers, order, 0).unsqueeze(-1))
        if order.minima:
            minimum = _scales(_dense(minima[:, :, ids].permute(2, 0, 1)), supers, order, 1).unsqueeze(-1)
            q.add_(minimum) if order.scales == "half" else q.sub_(minimum)
        return q.flatten(1)[:, : self.d_in]


def repack(rows: PackedRows, order_of_rows: Tensor | None = None) -> RepackedRows:
    """The same rows as `RepackedRows` on their device; `order_of_rows` int64 [rows] says which row comes where.

    Raises KeyError for a type that is not in ORDERS.
    """
    kind, order = QUANT_TYPES[rows.type], ORDERS[rows.type]
    count, d_in = rows.data.shape[0], rows.data.shape[1] // kind.block_bytes * kind.block_elements
    padded, supers = -(-count // ROW_MULTIPLE) * ROW_MULTIPLE, -(-d_in // SUPER)
    out = RepackedRows(rows.type, count, d_in, torch.zeros(padded * supers * order.row_words, dtype=torch.int32, device=rows.data.device))
    codes, high, *planes = out.fields()
    for first in range(0, count, CHUNK_ROWS):
        last = min(first + CHUNK_ROWS, count)
        data = rows.data[first:last] if order_of_rows is None else rows.data[order_of_rows[first:last]]
        missing = -len(data) % TILE_ROWS, supers * SUPER // kind.block_elements * kind.block_bytes - data.shape[1]
        data = torch.nn.functional.pad(data, (0, missing[1], 0, missing[0]))
        tiles = slice(first // TILE_ROWS, (first + len(data)) // TILE_ROWS)
        q, *numbers = _read(data.view(len(data), supers, -1), rows.type)
        words, beside = _words(q, order)
        codes[tiles] = words.view(-1, TILE_ROWS, *words.shape[1:]).transpose(1, 2)
        if order.high:
            high[tiles] = beside.view(-1, TILE_ROWS, *beside.shape[1:]).transpose(1, 2)
        for plane, part in zip(planes, numbers, strict=True):
            if part is not None:
                plane[..., first:first + len(data)] = part.view(len(data), *plane.shape[:-1]).movedim(0, -1)
    return out


def _read(data: Tensor, type_name: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """uint8 [n, supers, bytes] -> codes uint8 [n, supers, 256]; scales, minima, super-scales int32 [n, words] where there are any."""
    n, supers, _ = data.shape
    kind, order = QUANT_TYPES[type_name], ORDERS[type_name]
    blocks = data.reshape(-1, kind.block_bytes)

    def words(part: Tensor) -> Tensor:
        return part.contiguous().view(torch.int32).reshape(n, -1)

    minima = supers_of = None
    if type_name == "Q6_K":
        q = unpack(blocks[:, :128], 4, 64).reshape(-1, 256) | unpack(blocks[:, 128:192], 2, 32).reshape(-1, 256) << 4
        scales, supers_of = words(blocks[:, 192:208]), words(torch.nn.functional.pad(blocks[:, 208:], (0, 2)))
    elif order.scales == "six":
        scale, minimum = six_bit_pairs(blocks[:, 4:16])
        scales, minima, supers_of = words(scale.byte()), words(minimum.byte()), words(blocks[:, :4])
        q = unpack(blocks[:, -128:], 4, 32).reshape(-1, 256)
        if order.bits == 5:
            q = q | unpack(blocks[:, 16:48], 1, 32).reshape(-1, 256) << 4
    else:
        scales = words(blocks[:, :2].reshape(n, -1))
        minima = words(blocks[:, 2:4].reshape(n, -1)) if order.minima else None
        q = blocks[:, -32:] if order.bits == 8 else unpack(blocks[:, -16:], 4, 16).reshape(-1, 32)
        if order.bits == 5:
            q = q | unpack(blocks[:, -20:-16], 1, 1).reshape(-1, 32) << 4
    return q.reshape(n, supers, SUPER), scales, minima, supers_of


def _words(q: Tensor, order: CodeOrder) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n, supers, 256] -> int32 [n, supers, words] and their high bytes [n, supers, 32]."""
    n, supers = q.shape[:2]
    if order.bits == 8:
        return q.view(n, supers, 2, 4, 32).transpose(3, 4).contiguous().view(torch.int32).reshape(n, supers, 64), q
    codes = q.view(n, supers, -1, 8, order.group).transpose(2, 3).reshape(n, supers, 8, 32).int()
    lanes = [torch.zeros_like(codes[:, :, 0]) for _ in range(3)]
    for index, pieces in enumerate(PIECES[order.bits]):
        for lane, shift, mask in pieces:
            lanes[lane] |= (codes[:, :, index] & mask) << shift
    words = [lane.view(n, supers, 16, 2) for lane in lanes[:2]]
    words = torch.stack([lane[..., 0] | lane[..., 1] << 16 for lane in words], -1).flatten(2)
    return words, lanes[2].to(torch.uint8 if order.high == 1 else torch.int16)


def _codes(words: Tensor, high: Tensor, order: CodeOrder) -> Tensor:
    """The inverse of `_words`: [n, supers, 256], int8 for 8 bits, else int32."""
    n, supers = words.shape[:2]
    if order.bits == 8:
        return words.contiguous().view(torch.int8).view(n, supers, 2, 32, 4).transpose(3, 4).reshape(n, supers, SUPER)
    pairs = words.view(n, supers, 16, 2)
    lanes = *(torch.stack((lane & 0xFFFF, lane >> 16 & 0xFFFF), -1).flatten(2) for lane in pairs.unbind(-1)), high.int() & 0xFFFF
    codes = []
    for pieces in PIECES[order.bits]:
        codes.append(sum((lanes[lane] >> shift) & mask for lane, shift, mask in pieces))
    return torch.stack(codes, 2).view(n, supers, 8, -1, order.group).transpose(2, 3).reshape(n, supers, SUPER)


def _scales(words: Tensor, supers: Tensor, order: CodeOrder, index: int) -> Tensor:
    """int32 [n, supers, words] -> fp32 [n, supers, numbers]: scales (index 0) or minima (1)."""
    if order.scales == "half":
        return words.view(torch.float16).float()
    numbers = words.view(torch.int8 if order.scales == "eight" else torch.uint8).float()
    halves = supers.view(torch.float16).float().view(*supers.shape, 2)
    return numbers * halves[..., index : index + 1]


def _dense(part: Tensor) -> Tensor:
    """A copy whose numbers lie end to end, so that it can be viewed as others."""
    return part.clone(memory_format=torch.contiguous_format)

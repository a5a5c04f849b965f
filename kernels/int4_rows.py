"""Rows of four-bit numbers as torch's own product for CPUs takes them, with a scale and a zero for every 32 of a row.

The product rounds its inputs, its result, scales and zeros to bf16; sums are fp32. Of many tokens at once the numbers are unpacked first.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .quant import QUANT_TYPES
from .quant.four_bits import FOUR_BITS, GROUP, coded_rows

BLOCK = 64
"""rows that lie together; the last of a matrix may be fewer"""
FEW_TOKENS = 64
"""up to which torch's product is as fast as to unpack the numbers and multiply them in fp32"""
PACKED_ELEMENTS = 1 << 22
"""that are packed at once: torch takes them as int32"""
UNPACKED_ELEMENTS = 1 << 20
"""that become fp32 at once"""
MIDDLE = 8
"""the code that stands for the zero of its group"""


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """[rows, d_in]. `codes`: uint8, blocks of up to BLOCK rows as torch packs them; `scales`: bf16 [d_in / GROUP, rows, 2], scale and zero:
    a number is scale * (code - MIDDLE) + zero."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[1], self.scales.shape[0] * GROUP

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def linear(self, x: Tensor) -> Tensor:
        """Semantics: y[t, o] = sum_i x[t, i] weight[o, i].  x [T, d_in] fp32 or bf16; y [T, rows], bf16 of few tokens, else fp32."""
        if x.shape[0] <= FEW_TOKENS:
            return torch._weight_int4pack_mm_for_cpu(x.bfloat16(), self.codes, GROUP, self.scales)
        x = x.float()
        sums = x.view(x.shape[0], -1, GROUP).sum(2)
        y = torch.mm(sums, self._offsets(0, self.shape[0]))
        for first, count, columns in self._unpacked(UNPACKED_ELEMENTS):
            y[:, first:first + count].addmm_(x, columns)
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y [T, d_in] fp32."""
        d_in = self.shape[1]
        found = torch.empty(ids.shape[0], d_in)
        for first, end, width in self._sections():
            here = ((ids >= first) & (ids < end)).nonzero().squeeze(1)
            block, column = (ids[here] - first).div(width, rounding_mode="floor"), (ids[here] - first) % width
            codes = _columns(self._blocks(first, end, width).index_select(0, block), width)
            found[here] = codes.gather(2, column.view(-1, 1, 1).expand(-1, d_in, 1)).squeeze(2).float()
        scales = self.scales.index_select(1, ids).float().permute(2, 1, 0).unsqueeze(3)
        return found.view(-1, d_in // GROUP, GROUP).mul_(scales[0]).add_(scales[1] - MIDDLE * scales[0]).view(-1, d_in)

    def chunks(self, elements: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, fp32 [n, d_in]) over all rows, about `elements` numbers at a time."""
        for first, count, columns in self._unpacked(elements):
            offsets = self._offsets(first, first + count).t().unsqueeze(2)
            yield first, (columns.t().reshape(count, -1, GROUP) + offsets).view(count, -1)

    def _offsets(self, first: int, end: int) -> Tensor:
        """fp32 [d_in / GROUP, rows]: what a number is more than scale * code."""
        scales, zeros = self.scales[:, first:end].float().unbind(2)
        return zeros - MIDDLE * scales

    def _unpacked(self, elements: int) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, rows, fp32 [d_in, rows]) over all rows: scale * code, without the offsets."""
        d_in = self.shape[1]
        step = max(1, elements // (BLOCK * d_in)) * BLOCK
        for start, stop, width in self._sections():
            for first in range(start, stop, step):
                end = min(first + step, stop)
                numbers = torch.empty(d_in, end - first)
                numbers.view(d_in, -1, width).copy_(_columns(self._blocks(first, end, width), width).transpose(0, 1))
                scales = self.scales[:, first:end, 0].float().unsqueeze(1)
                numbers.view(-1, GROUP, end - first).mul_(scales)
                yield first, end - first, numbers

    def _sections(self) -> Iterator[tuple[int, int, int]]:
        """(first row, end row, rows of a block) of the whole blocks, and of the last one that is not."""
        rows = self.shape[0]
        full = rows - rows % BLOCK
        if full:
            yield 0, full, BLOCK
        if full < rows:
            yield full, rows, rows - full

    def _blocks(self, first: int, end: int, width: int) -> Tensor:
        """uint8 [blocks, d_in, width / 2] of the rows from `first` to `end`."""
        d_in = self.shape[1]
        return self.codes.view(-1)[first * d_in // 2 : end * d_in // 2].view(-1, d_in, width // 2)


def takes_int4(type_name: str, rows: int, d_in: int) -> bool:
    """Whether rows of this type can be packed so here."""
    if type_name not in FOUR_BITS or rows % 16 or d_in % GROUP:
        return False
    return all(_pairs_dim(width) is not None for width in {min(rows, BLOCK), rows % BLOCK} - {0})


def pack_int4(data: Tensor, type_name: str) -> Int4Rows:
    """uint8 [rows, bytes of a row] of a type that `takes_int4`."""
    kind = QUANT_TYPES[type_name]
    rows, d_in = data.shape[0], data.shape[1] // kind.block_bytes * kind.block_elements
    scales = torch.empty(d_in // GROUP, rows, 2, dtype=torch.bfloat16)
    codes = torch.empty(rows * d_in // 2, dtype=torch.uint8)
    step = max(1, PACKED_ELEMENTS // (BLOCK * d_in)) * BLOCK
    for first in range(0, rows, step):
        part = data[first:first + step]
        q, scale, offset = coded_rows(part, type_name, kind.block_bytes)
        here = slice(first * d_in // 2, (first + part.shape[0]) * d_in // 2)
        codes[here] = torch._convert_weight_to_int4pack_for_cpu(q.int(), 1).view(torch.uint8).flatten()
        scales[:, first:first + part.shape[0], 0] = scale.t()
        scales[:, first:first + part.shape[0], 1] = (offset + MIDDLE * scale).t()
    return Int4Rows(codes.view(rows, d_in // 2), scales)


def _columns(blocks: Tensor, width: int) -> Tensor:
    """uint8 [n, d_in, width / 2] -> codes uint8 [n, d_in, width], a row of the matrix in each column."""
    return torch.stack((blocks & 15, blocks >> 4), _pairs_dim(width)).flatten(2)


@cache
def _pairs_dim(width: int) -> int | None:
    """How torch pairs the columns of a block of `width` rows in bytes: j and j + width / 2 (-2), 2 j and 2 j + 1 (-1); None: otherwise."""
    rows = torch.arange(width, dtype=torch.int32).unsqueeze(1).expand(width, GROUP)
    found = torch.zeros(GROUP, width // 2, 2, dtype=torch.int64)
    for bit in range(6):
        packed = torch._convert_weight_to_int4pack_for_cpu((rows >> bit & 1).contiguous(), 1).view(torch.uint8).view(GROUP, width // 2)
        found |= torch.stack((packed & 15, packed >> 4), -1).long() << bit
    wanted = torch.arange(width)
    if torch.equal(found, wanted.view(2, -1).t().expand_as(found)):
        return -2
    return -1 if torch.equal(found, wanted.view(-1, 2).expand_as(found)) else None

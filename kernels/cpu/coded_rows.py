"""Rows of packed numbers as the CPU's own product reads them: 32 rows beside each other, their codes as the file has them."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..packed import PackedRows
from ..quant import QUANT_TYPES
from ..quant.codes import CODED, coded_rows
from .block_product import BLOCK, CodeKind
from .products import KINDS, MOST_ROWS, multiply, unpack

PACKED_ELEMENTS = 1 << 20
"""that are packed at once"""
UNPACKED_ELEMENTS = 1 << 20
"""that become fp32 at once where many tokens are multiplied"""
ROUNDED = 2.0**-11
"""what fp16 may round of a scale"""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """[count, d_in]. `codes`: uint8 [blocks, d_in, bytes of a block at one place]; `scales`: fp16 [blocks, groups, 1 or 2, BLOCK], behind
    the scales the offsets (see CodeKind). The last block is filled up with zeros."""

    kind: CodeKind
    codes: Tensor
    scales: Tensor
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """What the compiled functions need to know: its kind's number, the addresses of codes and scales, groups of a row, rows."""
        return KINDS.index(self.kind), self.codes.data_ptr(), self.scales.data_ptr(), self.scales.shape[1], self.count

    def linear(self, x: Tensor) -> Tensor:
        """Semantics: y[t, o] = sum_i x[t, i] weight[o, i], by fp32 throughout.  x [T, d_in] of any float type; y fp32 [T, count]."""
        x = x.float().contiguous()
        y = torch.empty(x.shape[0], self.count)
        if x.shape[0] <= MOST_ROWS:
            multiply(self.place, x.numpy(), y.numpy())
            return y
        for first, columns in self._columns(UNPACKED_ELEMENTS):
            torch.mm(x, columns, out=y[:, first:first + columns.shape[1]])
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y fp32 [T, d_in]."""
        block, lane = ids.div(BLOCK, rounding_mode="floor"), ids % BLOCK
        codes = self.codes.index_select(0, block)
        here = (lane % codes.shape[2]).view(-1, 1, 1).expand(-1, codes.shape[1], 1)
        found = codes.gather(2, here).squeeze(2)
        if self.kind.bits == 4:
            found = (found >> (lane // codes.shape[2] * 4).to(torch.uint8).unsqueeze(1)) & 15
        else:
            found = found.view(torch.int8)
        scales = self.scales.index_select(0, block).float()
        scales = scales.gather(3, lane.view(-1, 1, 1, 1).expand(*scales.shape[:3], 1)).squeeze(3)
        numbers = found.view(*scales.shape[:2], self.kind.group).float().mul_(scales[:, :, :1])
        return (numbers.add_(scales[:, :, 1:]) if self.kind.offsets else numbers).flatten(1)

    def chunks(self, elements: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, fp32 [n, d_in]) over all rows, about `elements` numbers at a time."""
        for first, columns in self._columns(elements):
            yield first, columns.t().contiguous()

    def _columns(self, elements: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, fp32 [d_in, n]) over all rows, each a copy."""
        step = max(1, elements // (BLOCK * self.shape[1])) * BLOCK
        for first in range(0, self.count, step):
            count = min(step, self.count - first)
            columns = torch.empty(self.shape[1], -(-count // BLOCK) * BLOCK)
            unpack(self.place, first // BLOCK, columns.numpy())
            yield first, columns[:, :count]


def code_rows(rows: PackedRows) -> CodedRows | None:
    """`rows` in this order; None for a type without codes, and where fp16 would round scales too far."""
    if rows.type not in CODED:
        return None
    coded, file = CODED[rows.type], QUANT_TYPES[rows.type]
    kind = CodeKind(coded.bits, coded.group, coded.offsets)
    count, d_in = rows.data.shape[0], rows.data.shape[1] // file.block_bytes * file.block_elements
    blocks, groups = -(-count // BLOCK), d_in // kind.group
    codes = torch.zeros(blocks, d_in, kind.step_bytes, dtype=torch.uint8)
    scales = torch.zeros(blocks, groups, 1 + kind.offsets, BLOCK, dtype=torch.float16)
    for first in range(0, blocks, step := max(1, PACKED_ELEMENTS // (BLOCK * d_in))):
        part = rows.data[first * BLOCK:(first + step) * BLOCK]
        q, scale, offset = coded_rows(part, rows.type, file.block_bytes)
        for number, exact in enumerate((scale, offset) if kind.offsets else (scale,)):
            if bool(((exact.half().float() - exact).abs() > ROUNDED * exact.abs()).any()):
                return None
            _by_block(exact.half(), scales[first:first + step, :, number])
        here = codes[first:first + step]
        if kind.bits == 8:
            _by_block(q.view(torch.uint8), here)
        else:
            both = torch.zeros(here.shape[0], d_in, BLOCK, dtype=torch.uint8)
            _by_block(q, both)
            here.copy_(both[:, :, :BLOCK // 2] | both[:, :, BLOCK // 2:] << 4)
    return CodedRows(kind, codes, scales, count)


def _by_block(rows: Tensor, out: Tensor) -> None:
    """[n, m] -> out [blocks, m, BLOCK], whose last rows may stay as they are."""
    whole = rows.shape[0] // BLOCK
    out[:whole] = rows[:whole * BLOCK].view(whole, BLOCK, rows.shape[1]).transpose(1, 2)
    if whole < out.shape[0]:
        out[whole, :, :rows.shape[0] - whole * BLOCK] = rows[whole * BLOCK:].t()

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
from .products import KINDS, MOST_ROWS, multiply, pick, unpack
from .vectors import LANES

PACKED_ELEMENTS = 1 << 20
"""that are packed at once"""
UNPACKED_ELEMENTS = 1 << 20
"""that become fp32 at once where many tokens are multiplied"""
ROUNDED = 2.0**-11
"""what fp16 may round of a scale"""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """[count, d_in]. `data`: uint8 [blocks, groups, bytes of a group], in each the codes of a block place by place and its scales (see
    CodeKind). The last block is filled up with zeros."""

    kind: CodeKind
    data: Tensor
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.data.shape[1] * self.kind.group

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What the compiled functions need to know: its kind's number, the address of its data, groups of a row, rows."""
        return KINDS.index(self.kind), self.data.data_ptr(), self.data.shape[1], self.count

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
        y = torch.empty(ids.shape[0], self.shape[1])
        pick(self.place, ids.numpy(), y.numpy())
        return y

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
    data = torch.zeros(blocks, groups, kind.group_bytes, dtype=torch.uint8)
    for first in range(0, blocks, step := max(1, PACKED_ELEMENTS // (BLOCK * d_in))):
        q, scale, offset = coded_rows(rows.data[first * BLOCK:(first + step) * BLOCK], rows.type, file.block_bytes)
        codes, scales = _fields(kind, data[first:first + step])
        for number, exact in enumerate((scale, offset) if kind.offsets else (scale,)):
            if bool(((exact.half().float() - exact).abs() > ROUNDED * exact.abs()).any()):
                return None
            scales[:, :, number] = _by_block(exact.half())
        by_block = _by_block(q.view(torch.uint8)).view(codes.shape[0], groups, kind.group, BLOCK)
        codes.copy_(by_block if kind.bits == 8 else by_block[..., :LANES] | by_block[..., LANES:] << 4)
    return CodedRows(kind, data, count)


def _fields(kind: CodeKind, data: Tensor) -> tuple[Tensor, Tensor]:
    """Views of uint8 [blocks, groups, bytes of a group]: codes [blocks, groups, group, bytes of a block at one place], scales fp16
    [blocks, groups, 1 or 2, BLOCK]"""
    codes, scales = data[:, :, :kind.code_bytes], data[:, :, kind.code_bytes:]
    return codes.unflatten(2, (kind.group, kind.step_bytes)), scales.view(torch.float16).unflatten(2, (1 + kind.offsets, BLOCK))


def _by_block(rows: Tensor) -> Tensor:
    """[n, m] -> [blocks, m, BLOCK], zeros behind the last row."""
    blocks = -(-rows.shape[0] // BLOCK)
    whole = torch.zeros(blocks * BLOCK, rows.shape[1], dtype=rows.dtype)
    whole[:rows.shape[0]] = rows
    return whole.view(blocks, BLOCK, rows.shape[1]).transpose(1, 2)

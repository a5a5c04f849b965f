"""Rows of eight-bit numbers with one scale each, as torch's own product for CPUs takes them.

What a file holds in blocks with scales of their own is rounded once more, to 1/254 of the largest number of its row at most.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .packed import PackedWeight

EIGHT_BITS = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
"""types of five to eight bits"""
MOST_ERROR = 0.02
"""that rounding once more may add: the length of the differences over that of the matrix"""
FEW_TOKENS = 16
"""up to which torch's product is as fast as to make the numbers fp32 first"""
UNPACKED_ELEMENTS = 1 << 20
"""that become fp32 at once"""
PACKED_ELEMENTS = 1 << 20
"""that are rounded at once"""
LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """[rows, d_in]: scale * number. `numbers`: int8 [rows, d_in]; `scales`: bf16 [rows]."""

    numbers: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def linear(self, x: Tensor) -> Tensor:
        """Semantics: y[t, o] = sum_i x[t, i] weight[o, i].  x [T, d_in] fp32 or bf16; y [T, rows], bf16 of few tokens, else fp32."""
        if x.shape[0] <= FEW_TOKENS:
            return torch._weight_int8pack_mm(x.bfloat16(), self.numbers, self.scales)
        x = x.float()
        y = x.new_empty(x.shape[0], self.shape[0])
        for first, numbers in self._unpacked(UNPACKED_ELEMENTS):
            torch.mm(x, numbers.t(), out=y[:, first:first + numbers.shape[0]])
        return y.mul_(self.scales.float())

    def rows(self, ids: Tensor) -> Tensor:
        """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y [T, d_in] fp32."""
        return self.numbers.index_select(0, ids).float().mul_(self.scales.index_select(0, ids).float().unsqueeze(1))

    def chunks(self, elements: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, fp32 [n, d_in]) over all rows, about `elements` numbers at a time."""
        for first, numbers in self._unpacked(elements):
            yield first, numbers.mul_(self.scales[first:first + numbers.shape[0]].float().unsqueeze(1))

    def _unpacked(self, elements: int) -> Iterator[tuple[int, Tensor]]:
        step = max(1, elements // self.numbers.shape[1])
        for first in range(0, self.numbers.shape[0], step):
            yield first, self.numbers[first:first + step].float()


def round_int8(matrix: Tensor) -> Int8Rows:
    """`matrix` [rows, d_in] of any float dtype, rounded to eight bits."""
    exact = matrix.float()
    scales = (exact.abs().amax(1) / LARGEST).bfloat16()
    scale = scales.float().unsqueeze(1)
    numbers = (exact / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-LARGEST, LARGEST)
    return Int8Rows(numbers.to(torch.int8), scales)


def takes_int8(type_name: str, rows: int, d_in: int) -> bool:
    """Whether rows of this type may be packed so here: types of five to eight bits, in shapes that torch's product reads."""
    return type_name in EIGHT_BITS and rows % 16 == 0 and d_in % 32 == 0


def pack_int8(weight: PackedWeight) -> Int8Rows | None:
    """`weight` of a type that `takes_int8`; None where a few large numbers would cost the others of their rows more than MOST_ERROR."""
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.bfloat16)
    wrong = total = 0.0
    for first, exact in weight.chunks(torch.float32, PACKED_ELEMENTS):
        here = slice(first, first + exact.shape[0])
        rounded = round_int8(exact)
        numbers[here], scales[here] = rounded.numbers, rounded.scales
        wrong += rounded.rows(torch.arange(exact.shape[0])).sub_(exact).square_().sum().item()
        total += exact.square_().sum().item()
    return Int8Rows(numbers, scales) if wrong <= MOST_ERROR**2 * total else None

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
MOST_ERROR = 0.01
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
    """[rows, d_in]: scale * number * column. `numbers`: int8 [rows, d_in]; `scales`: bf16 [rows]; `columns`: fp32 [d_in], None for ones."""

    numbers: Tensor
    scales: Tensor
    columns: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes + (0 if self.columns is None else self.columns.nbytes)

    def linear(self, x: Tensor) -> Tensor:
        """Semantics: y[t, o] = sum_i x[t, i] weight[o, i].  x [T, d_in] fp32 or bf16; y [T, rows], bf16 of few tokens, else fp32."""
        if self.columns is not None:
            x = x * self.columns
        if x.shape[0] <= FEW_TOKENS:
            return torch._weight_int8pack_mm(x.bfloat16(), self.numbers, self.scales)
        x = x.float()
        y = x.new_empty(x.shape[0], self.shape[0])
        for first, numbers in self._unpacked(UNPACKED_ELEMENTS):
            torch.mm(x, numbers.t(), out=y[:, first:first + numbers.shape[0]])
        return y.mul_(self.scales.float())

    def rows(self, ids: Tensor) -> Tensor:
        """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y [T, d_in] fp32."""
        return self._scaled_(self.numbers.index_select(0, ids).float(), self.scales.index_select(0, ids))

    def chunks(self, elements: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, fp32 [n, d_in]) over all rows, about `elements` numbers at a time."""
        for first, numbers in self._unpacked(elements):
            yield first, self._scaled_(numbers, self.scales[first:first + numbers.shape[0]])

    def _scaled_(self, numbers: Tensor, scales: Tensor) -> Tensor:
        numbers.mul_(scales.float().unsqueeze(1))
        return numbers if self.columns is None else numbers.mul_(self.columns)

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
    """`weight` of a type that `takes_int8`; None where it would be rounded by more than MOST_ERROR.

    Where a few columns are far larger than others, as in many embeddings, the scales of rows have to do for columns that are less so.
    """
    found, error = _rounded(weight, None)
    if error > MOST_ERROR:
        squares = sum(exact.square_().sum(0) for _, exact in weight.chunks(torch.float32, PACKED_ELEMENTS))
        found, error = _rounded(weight, torch.where(squares == 0, 1.0, squares / weight.shape[0]) ** 0.25)
    return found if error <= MOST_ERROR else None


def _rounded(weight: PackedWeight, columns: Tensor | None) -> tuple[Int8Rows, float]:
    """`weight` in eight bits, and the length of the differences over that of the matrix."""
    found = Int8Rows(torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0], dtype=torch.bfloat16), columns)
    wrong = total = 0.0
    for first, exact in weight.chunks(torch.float32, PACKED_ELEMENTS):
        ids = torch.arange(first, first + exact.shape[0])
        part = round_int8(exact if columns is None else exact / columns)
        found.numbers[ids], found.scales[ids] = part.numbers, part.scales
        wrong += found.rows(ids).sub_(exact).square_().sum().item()
        total += exact.square_().sum().item()
    return found, (wrong / total) ** 0.5 if total else 0.0

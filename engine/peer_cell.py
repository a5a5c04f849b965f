"""A linear under adapters that other engines have ops for."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

SCALE = 0.7
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class PeerCell:
    """A linear [ends[-1], d_in] whose rows have adapters of `ranks`: `of_row` [rows], ascending, which each has."""

    d_in: int
    ends: tuple[int, ...]
    ranks: Sequence[int]
    of_row: Sequence[int]
    prompt: bool
    """its rows are those of prompts, one an adapter; else each is a reply's"""
    weights: Sequence[Tensor]
    """copies of the base's"""
    x: Tensor
    """[rows, d_in]"""

    @property
    def slices(self) -> list[tuple[int, int]]:
        return list(pairwise((0, *self.ends)))

    @property
    def rank(self) -> int:
        """What ranks are padded to."""
        return max(self.ranks)

    def pairs(self) -> Iterator[Pair]:
        """Random (A [adapters, slices, rank, d_in], B [adapters, ends[-1], rank]) for each copy, zero beyond an adapter's own rank."""
        for _ in self.weights:
            a = self._random(len(self.slices), self.rank, self.d_in, size=self.d_in ** -0.5)
            b = self._random(self.ends[-1], self.rank, size=0.02)
            for adapter, rank in enumerate(self.ranks):
                a[adapter, :, rank:] = 0
                b[adapter, :, rank:] = 0
            yield a, b

    def _random(self, *shape: int, size: float) -> Tensor:
        return torch.empty(len(self.ranks), *shape, dtype=self.x.dtype, device=self.x.device).normal_(0.0, size)

    def reference(self, a: Tensor, b: Tensor) -> Tensor:
        """[rows, ends[-1]] float64: what the adapters add."""
        out = torch.zeros(len(self.of_row), self.ends[-1], dtype=torch.float64, device=self.x.device)
        for row, adapter in enumerate(self.of_row):
            for index, (start, end) in enumerate(self.slices):
                out[row, start:end] = SCALE * (b[adapter, start:end].double() @ (a[adapter, index].double() @ self.x[row].double()))
        return out

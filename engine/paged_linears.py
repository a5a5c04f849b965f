"""The linears of a layer whose rank rows lie in pages: gathered when a step without a graph comes to them, and kept nowhere."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.lora import ExpandSlice, LoraLinear, RowVectors
from ..kernels.rank_pages import RankPool


@dataclass(frozen=True, slots=True)
class PagedLinear:
    """One fused linear of one layer."""

    pool: RankPool
    layer: int
    """in the pool"""
    pages: tuple[int, ...]
    index: Tensor
    """`pages` on the device, int64"""
    slices: tuple[int, ...]
    """those that any of the adapters changes"""
    layout: int
    """of rank rows slice by slice, in each page by page, then those of `behind`"""
    bias: RowVectors | None
    behind: LoraLinear | None
    """rank rows that are not in pages"""

    def gathered(self) -> LoraLinear:
        """As the places of a forward read it; a single page as it lies."""
        a, b = self.pool.a[:, self.layer], self.pool.b[:, self.layer]
        if len(self.pages) == 1:
            a, b = a[self.pages[0]].flatten(0, 1), b[self.pages[0]]
        else:
            a = a.transpose(0, 1).index_select(1, self.index).flatten(0, 2)
            b = b.transpose(0, 1).index_select(1, self.index).flatten(1)
        starts, rows = (0, *self.pool.ends), b.shape[1]
        slices = tuple(
            ExpandSlice(index * rows, (index + 1) * rows, starts[index], starts[index + 1], b[starts[index]:starts[index + 1]].T)
            for index in self.slices)
        if self.behind is None:
            return LoraLinear(a, slices, self.layout, self.bias)
        moved = tuple(replace(one, row_start=one.row_start + len(a), row_end=one.row_end + len(a)) for one in self.behind.slices)
        return LoraLinear(torch.cat((a, self.behind.a)), (*slices, *moved), self.layout, self.bias)


class PagedLinears(Mapping[str, LoraLinear]):
    """By name; each look at one in pages gathers."""

    def __init__(self, linears: Mapping[str, PagedLinear | LoraLinear]) -> None:
        self._linears = linears

    def __getitem__(self, name: str) -> LoraLinear:
        linear = self._linears[name]
        return linear.gathered() if isinstance(linear, PagedLinear) else linear

    def __iter__(self) -> Iterator[str]:
        return iter(self._linears)

    def __len__(self) -> int:
        return len(self._linears)

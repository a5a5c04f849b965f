"""The linears of a layer whose rank rows lie in pages: gathered when a step without a graph comes to them, and kept nowhere."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.lora import ExpandSlice, LoraLinear, RowVectors
from ..kernels.rank_pages import PAGE_ROWS, RankPool
from .page_lists import KindLists


class Layouts(Sequence[Tensor]):
    """Maps of rank rows to columns of W, by number; one is on the device once a step reads it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: dict[tuple[int, ...], int] = {}
        self._maps: dict[int, Tensor] = {}

    def number(self, columns: tuple[int, ...]) -> int:
        return self._numbers.setdefault(columns, len(self._numbers))

    def columns(self, number: int) -> tuple[int, ...]:
        return list(self._numbers)[number]

    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        if number not in self._maps:
            self._maps[number] = torch.tensor(self.columns(number), device=self._device)
        return self._maps[number]

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass(frozen=True)
class PagedLinear:
    """One fused linear of one layer."""

    pool: RankPool
    layer: int
    """in the pool"""
    lists: KindLists
    layouts: Layouts
    bias: RowVectors | None
    behind: LoraLinear | None
    """rank rows that are not in pages"""

    def gathered(self) -> LoraLinear:
        """As the places of a forward read it; a single page as it lies."""
        a, b = self.pool.a[:, self.layer], self.pool.b[:, self.layer]
        if len(self._pages) == 1:
            a, b = a[self._pages[0]].flatten(0, 1), b[self._pages[0]]
        else:
            a = a.transpose(0, 1).index_select(1, self._index).flatten(0, 2)
            b = b.transpose(0, 1).index_select(1, self._index).flatten(1)
        starts, rows = (0, *self.pool.ends), b.shape[1]
        slices = tuple(
            ExpandSlice(index * rows, (index + 1) * rows, starts[index], starts[index + 1], b[starts[index]:starts[index + 1]].T)
            for index in self.lists.slices)
        if self.behind is None:
            return LoraLinear(a, slices, self._layout, self.bias)
        moved = tuple(replace(one, row_start=one.row_start + len(a), row_end=one.row_end + len(a)) for one in self.behind.slices)
        return LoraLinear(torch.cat((a, self.behind.a)), (*slices, *moved), self._layout, self.bias)

    @cached_property
    def _pages(self) -> tuple[int, ...]:
        return self.lists.at(self.layer)[0]

    @cached_property
    def _index(self) -> Tensor:
        return self.lists.index(self._pages, self.pool.a.device)

    @cached_property
    def _layout(self) -> int:
        """Of rank rows slice by slice, in each page by page, then those behind."""
        columns = self.lists.at(self.layer)[1]
        rows = [column for column in columns for _ in range(PAGE_ROWS)] * self.pool.slices
        return self.layouts.number((*rows, *(self.layouts.columns(self.behind.layout) if self.behind else ())))


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

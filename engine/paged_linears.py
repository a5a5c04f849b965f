"""A linear of a layer whose rank rows lie in pages, as steps without a graph read it, and the maps of rows that lie elsewhere."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.lora import LoraLinear, LoraStep, RowVectors
from ..kernels.lora_tiles import Shrunk, SideStream, lora_shrink_tiles
from ..kernels.rank_pages import RankPool
from .page_lists import PageLists


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


@dataclass(frozen=True, slots=True)
class PagedLinear:
    """One fused linear of one layer."""

    pool: RankPool
    kind: str
    layer: int
    """in the pool"""
    lists: PageLists
    bias: RowVectors | None
    """None too where `behind` has it"""
    behind: LoraLinear | None
    """rank rows that are not in pages"""
    side: SideStream | None

    def shrink(self, x: Tensor, step: LoraStep) -> Shrunk:
        """H of x [rows, d_in], perhaps computed beside what comes next."""
        return lora_shrink_tiles(x, self.pool, self.layer, step.tiles, self.lists.number(self.kind, self.layer), self.side)

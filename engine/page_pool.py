"""Pages of rank rows on the device: what is free, which adapter has which, and how they are filled."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.rank_pages import RankPool
from .models.facts import ModelFacts
from .page_image import PageImage, page_shapes
from .page_loads import PageLoad, PageLoads
from .protocol import PagesView


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPages:
    """What one adapter has in the pool, by kind of fused linear."""

    pages: Mapping[str, tuple[int, ...]]
    ranks: Mapping[str, np.ndarray]
    """[layers, slices], 0 where it changes nothing"""
    nbytes: int
    load: PageLoad

    @property
    def counts(self) -> dict[str, int]:
        return {kind: len(pages) for kind, pages in self.pages.items()}


class PagePool:
    """`count` pages of each kind of fused linear, in memory that stays where it is: captured graphs hold its addresses."""

    def __init__(self, facts: ModelFacts, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count = count
        self.shapes = page_shapes(facts)
        self.dtype = dtype
        self.pinned = device.type == "cuda"
        """whether images of it should be"""
        self.pools = {
            kind: RankPool(*(torch.zeros(count, *size, dtype=dtype, device=device) for size in (shape.a, shape.b)), shape.ends)
            for kind, shape in self.shapes.items()}
        self._free = {kind: set(range(count)) for kind in self.shapes}
        self._loads = PageLoads(device)

    @property
    def free(self) -> dict[str, int]:
        """Pages of each kind that nobody has."""
        return {kind: len(pages) for kind, pages in self._free.items()}

    def image_bytes(self, needs: Mapping[str, int]) -> int:
        """What pages take, those of `needs` by kind."""
        return sum(count * self.shapes[kind].numbers for kind, count in needs.items()) * self.dtype.itemsize

    def enter(self, image: PageImage) -> AdapterPages:
        """Give an adapter the first free pages and fill them beside the steps; there must be enough of them."""
        taken = {kind: tuple(sorted(self._free[kind])[:count]) for kind, count in image.counts.items()}
        if lacking := [kind for kind, count in image.counts.items() if len(taken[kind]) < count]:
            raise LookupError(f"too few pages of {', '.join(lacking)} are free; evict an adapter first")
        for kind, pages in taken.items():
            self._free[kind] -= set(pages)
        load = self._loads.copy(self._targets(image, taken), [part.numbers for part in image.parts])
        return AdapterPages(taken, image.ranks, image.nbytes, load)

    def leave(self, pages: AdapterPages) -> None:
        """Take them back. What is launched already may read them to its end."""
        for kind, numbers in pages.pages.items():
            self._free[kind] |= set(numbers)

    def wait(self, pages: AdapterPages) -> None:
        """Steps launched from now on read what `pages` were filled with."""
        self._loads.wait(pages.load)

    def filled(self, pages: AdapterPages) -> bool:
        """Whether what they were filled with is there already."""
        return self._loads.over(pages.load)

    def views(self) -> tuple[PagesView, ...]:
        return tuple(PagesView(kind, self.count - free, self.count, self.image_bytes({kind: 1})) for kind, free in self.free.items())

    def _targets(self, image: PageImage, taken: Mapping[str, tuple[int, ...]]) -> list[Tensor]:
        """Where each part of `image` goes."""
        return [target for part in image.parts if not part.first
                for target in getattr(self.pools[part.kind], part.factor)[taken[part.kind][part.page]].split(len(part.numbers))]

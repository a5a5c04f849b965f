"""Which pages act in each linear of a step."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.rank_pages import MAX_PAGES
from .page_image import PageShape, pages_for
from .page_pool import AdapterPages

LIST_WORDS = 1 + 2 * MAX_PAGES
"""int32 of the list of one linear (RankRows.pages)"""
MAX_COLUMNS = MAX_PAGES
"""adapters of one step"""


@dataclass(frozen=True, slots=True, eq=False)
class KindLists:
    """Of one kind of fused linear: in each layer the pages that hold rows of it, adapter by adapter."""

    counts: np.ndarray
    """[layers]: how many of a row of `pages` and `columns` hold"""
    pages: np.ndarray
    """[layers, most]"""
    columns: np.ndarray
    """[layers, most]: the adapter of each, as a column of W"""
    slices: tuple[int, ...]
    """those that any of the adapters changes"""
    indexes: dict[tuple[int, ...], Tensor]
    """pages on the device, those that were asked for"""

    def index(self, pages: tuple[int, ...], device: torch.device) -> Tensor:
        """`pages` as int64 on the device."""
        if pages not in self.indexes:
            self.indexes[pages] = torch.tensor(pages, device=device)
        return self.indexes[pages]

    def at(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(pages, columns) of one layer."""
        count = self.counts[layer]
        return tuple(self.pages[layer, :count].tolist()), tuple(self.columns[layer, :count].tolist())


def page_lists(adapters: Sequence[AdapterPages | None], shapes: Mapping[str, PageShape]) -> dict[str, KindLists]:
    """By kind, those kinds that any of the adapters changes; an adapter's place among them is its column."""
    return {kind: _lists([(column, pages) for column, pages in enumerate(adapters) if pages is not None and kind in pages.pages], kind)
            for kind in shapes if any(pages is not None and kind in pages.pages for pages in adapters)}


def list_obstacle(names: Sequence[str], lists: Mapping[str, KindLists]) -> str:
    """Why a captured step cannot read the lists of these adapters, "" when it can."""
    if len(names) > MAX_COLUMNS:
        return f"{len(names)} adapters act, at most {MAX_COLUMNS} do in a graph"
    for kind, one in lists.items():
        if (most := int(one.counts.max())) > MAX_PAGES:
            return f"{most} pages of {kind} act, at most {MAX_PAGES} do in a graph"
    return ""


def _lists(adapters: Sequence[tuple[int, AdapterPages]], kind: str) -> KindLists:
    pages = np.concatenate([np.array(one.pages[kind], np.int32) for _, one in adapters])
    columns = np.concatenate([np.full(len(one.pages[kind]), column, np.int32) for column, one in adapters])
    needed = [pages_for(one.ranks[kind].max(1)) for _, one in adapters]  # of each layer; an adapter may have less in one than in another
    acts = np.concatenate([np.arange(len(one.pages[kind])) < count[:, None] for (_, one), count in zip(adapters, needed, strict=True)], 1)
    order = np.argsort(~acts, 1, kind="stable")
    changed = np.logical_or.reduce([one.ranks[kind].any(0) for _, one in adapters])
    return KindLists(acts.sum(1), pages[order], columns[order], tuple(np.flatnonzero(changed).tolist()), {})

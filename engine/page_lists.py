"""Which pages act in each linear of a step."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

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

    def at(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(pages, columns) of one layer."""
        count = self.counts[layer]
        return tuple(self.pages[layer, :count].tolist()), tuple(self.columns[layer, :count].tolist())


class PageLists:
    """The different ones among the lists of all kinds and layers, by number; found when a step without a graph first asks."""

    def __init__(self, lists: Mapping[str, KindLists]) -> None:
        self._lists = lists

    @property
    def different(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(pages, columns) of each."""
        return list(self._found[0])

    def number(self, kind: str, layer: int) -> int:
        return self._found[1][kind][layer]

    @cached_property
    def _found(self) -> tuple[dict[tuple[tuple[int, ...], tuple[int, ...]], int], dict[str, list[int]]]:
        numbers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        places = {kind: [numbers.setdefault(one.at(layer), len(numbers)) for layer in range(len(one.counts))]
                  for kind, one in self._lists.items()}
        return numbers, places


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
    return KindLists(acts.sum(1), pages[order], columns[order])

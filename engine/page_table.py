"""What acts in each linear of a decode step, as numbers that are written in RAM and uploaded: a captured graph reads them on the device."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ..kernels.rank_pages import MAX_PAGES, RankPool, RankRows
from .mix import ActiveUse
from .models.facts import ModelFacts, linear_layout
from .page_lists import LIST_WORDS
from .routing import Routing


class PageTable:
    """Rows of a step by adapters, and for each linear of each layer the pages that act there.

    `lists` int32 [linears, LIST_WORDS], `weights` and `late` (of what follows a DoRA in the mix of a row) fp32 [max_rows, MAX_COLUMNS] are
    memory of the caller, who uploads it; zero at first.
    """

    def __init__(self, facts: ModelFacts, lists: np.ndarray, weights: np.ndarray, late: np.ndarray) -> None:
        self._kinds = tuple(linear_layout(facts))
        self._head = lists[-1]
        self._lists = lists[:-1].reshape(facts.layers, len(self._kinds), LIST_WORDS)
        self._weights, self._late = weights, late
        self._routing: Routing | None = None
        self._rows: list[tuple[ActiveUse, ...] | None] = [()] * len(weights)
        """what each row was written for, where that holds for the tokens to come too"""

    @staticmethod
    def linears(facts: ModelFacts) -> int:
        """Lists of a table: of each layer's linears, then of the head."""
        return facts.layers * len(linear_layout(facts)) + 1

    def rank_rows(self, pools: Mapping[str, RankPool], lists: Tensor, weights: Tensor) -> list[dict[str, RankRows]]:
        """By layer, then the head: what its linears read, by kind. `lists` and `weights` are as those of the table, on the device."""
        of_layer = len(self._kinds)
        layers = [{kind: RankRows(pools[kind], layer, lists[layer * of_layer + place], weights) for place, kind in enumerate(self._kinds)}
                  for layer in range(len(self._lists))]
        return [*layers, {"lm_head": RankRows(pools["lm_head"], 0, lists[-1], weights)}]

    def compose(self, routing: Routing) -> bool:
        """Write the lists of these adapters; False when they stand there already. Their obstacle must be "".

        Rows are to be written again then.
        """
        if routing is self._routing:
            return False
        self._routing = routing
        self._lists[..., 0] = 0
        self._head[0] = 0
        for kind, one in routing.lists.items():
            target = self._head[None] if kind == "lm_head" else self._lists[:, self._kinds.index(kind)]
            most = min(one.pages.shape[1], MAX_PAGES)
            target[:, 0] = one.counts
            target[:, 1:1 + most] = one.pages[:, :most]
            target[:, 1 + MAX_PAGES:1 + MAX_PAGES + most] = one.columns[:, :most]
        self._weights[:], self._late[:] = 0, 0
        self._rows = [()] * len(self._weights)
        return True

    def fill(self, row: int, active: tuple[ActiveUse, ...], position: int, late: frozenset[str] = frozenset()) -> None:
        """Row `row` of the step is the token at index `position` of a request on which `active` acts (from its starts on), those named
        in `late` behind a DoRA."""
        if self._rows[row] is active:
            return
        self._weights[row], self._late[row] = 0, 0
        for use in active:
            if use.start <= position:
                weights = self._late if use.name in late else self._weights
                weights[row, self._routing.columns[use.name]] = use.scale
        self._rows[row] = active if all(use.start <= position for use in active) else None

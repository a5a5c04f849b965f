"""DoRA of one adapter: the gains of all its linears at a scale, and what of the base they follow from."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ..kernels.dora import (
    LowRank,
    RowStats,
    column_products,
    column_squares,
    delta_squares,
    row_gains,
    row_products,
    row_squares,
)
from ..kernels.weights import Weight
from .adapters.adapter import LoraPair

Place = tuple[int, str]
"""(layer, fused linear)"""
EMBEDDING: Place = (-1, "embed_tokens")
KEPT_SCALES = 8
"""of one adapter, whose gains are kept"""


class DoraRows:
    """Gains by place, a function of the scale alone: nothing is read of the base again. The last scales are kept."""

    def __init__(self, stats: Mapping[Place, RowStats]) -> None:
        self._sizes = {place: part.magnitude.shape[0] for place, part in stats.items()}
        columns = ([getattr(part, name) for part in stats.values()] for name in ("magnitude", "weight", "weight_delta", "delta"))
        self._stats = RowStats(*map(torch.cat, columns))
        self._gains: OrderedDict[float, Mapping[Place, Tensor]] = OrderedDict()

    @property
    def of_linears(self) -> bool:
        """Whether it has more than that of the embedding."""
        return any(place != EMBEDDING for place in self._sizes)

    @property
    def places(self) -> Collection[Place]:
        return self._sizes.keys()

    @property
    def nbytes(self) -> int:
        """With the gains of all scales that may be kept, 4 bytes a row each."""
        return self._stats.nbytes + KEPT_SCALES * self._stats.magnitude.shape[0] * 4

    def gains(self, scale: float) -> Mapping[Place, Tensor]:
        """[rows] fp32 by place; 1 for the rows of a fused linear that have no DoRA."""
        gains = self._gains.get(scale)
        if gains is None:
            parts = row_gains(self._stats, scale).split(list(self._sizes.values()))
            gains = self._gains[scale] = dict(zip(self._sizes, parts, strict=True))
            while len(self._gains) > KEPT_SCALES:
                self._gains.popitem(last=False)
        self._gains.move_to_end(scale)
        return gains


class BaseSquares:
    """<W,W> of the rows of the base's matrices, each computed when a DoRA first needs it."""

    def __init__(self) -> None:
        self._known: dict[Place, Tensor] = {}

    def of(self, place: Place, weight: Weight) -> Tensor:
        """fp64 [rows]; of the embedding by columns."""
        if place not in self._known:
            self._known[place] = column_squares(weight) if place == EMBEDDING else row_squares(weight)
        return self._known[place]


def linear_stats(place: Place, weight: Weight, pairs: Sequence[tuple[int, LoraPair]], squares: BaseSquares) -> RowStats:
    """Of a fused linear whose modules have the LoRA `pairs`, each with its first row."""
    found = [(start, pair, pair.magnitude) for start, pair in pairs if pair.magnitude is not None]
    device, rows = weight.device, weight.shape[0]
    stats = RowStats(*(torch.full((rows,), value, dtype=torch.float64, device=device) for value in (1.0, 1.0, 0.0, 0.0)))
    parts = [_low_rank(start, pair, device) for start, pair, _ in found]
    for (start, _, magnitude), part, products in zip(found, parts, row_products(weight, parts), strict=True):
        here = slice(start, start + part.b.shape[0])
        stats.magnitude[here] = magnitude.to(device, torch.float64)
        stats.weight[here] = squares.of(place, weight)[here]
        stats.weight_delta[here] = products
        stats.delta[here] = delta_squares(part)
    return stats


def embedding_stats(weight: Weight, pair: LoraPair, magnitude: Tensor, squares: BaseSquares) -> RowStats:
    """Of LoRA on the embedding: lengths are those of its columns [hidden] (PEFT's DoraEmbeddingLayer)."""
    part = _low_rank(0, pair, weight.device)
    return RowStats(magnitude.to(weight.device, torch.float64), squares.of(EMBEDDING, weight), column_products(weight, part),
                    delta_squares(part))


def _low_rank(start: int, pair: LoraPair, device: torch.device) -> LowRank:
    return LowRank(start, pair.a.to(device, torch.float32), pair.b.to(device, torch.float32), pair.scaling)

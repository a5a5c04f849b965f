"""Which adapters act on which rows of a step, in the order in which DoRA makes it matter."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.lora import LoraStep
from .dora_rows import Place
from .mix import ActiveUse, TokenMix, fill_weights
from .routing import Routing


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a step: `count` tokens of one request from index `position` of it."""

    mix: TokenMix
    position: int
    count: int


@dataclass(frozen=True, slots=True)
class GainUse:
    """One DoRA at one scale. `rows` are those of its phase that it acts on, None for all of them."""

    rows: Tensor | None
    gains: Mapping[Place, Tensor]


@dataclass(frozen=True, slots=True)
class Phase:
    """Every token passes a phase for each DoRA of its mix: what precedes that DoRA and its own delta are added, then its gains act."""

    rows: Tensor | None
    """of the step; None for all of them"""
    step: LoraStep
    """weights of these rows"""
    uses: tuple[GainUse, ...]


@dataclass(frozen=True, slots=True)
class RowsActing:
    """What acts on some rows. Without a DoRA all of it is in `step`, with one what follows the last DoRA of a row's mix."""

    weights: Tensor
    """[rows, adapters] fp32, of all phases together"""
    step: LoraStep | None
    """None when nothing is left for it"""
    phases: tuple[Phase, ...] = ()


def rows_acting(routing: Routing, spans: Sequence[Span]) -> RowsActing:
    """The rows of `spans`, end to end; `routing` has every adapter that acts on one of them."""
    weights = torch.zeros(sum(span.count for span in spans), len(routing.columns))
    row = 0
    for span in spans:
        fill_weights(weights, row, span.position, span.count, span.mix.active, routing.columns)
        row += span.count
    step = routing.step(weights)
    if not routing.dora:
        return RowsActing(step.weights, step)
    split = [_split(span.mix, routing.dora) for span in spans]
    phases = tuple(_phase(routing, spans, split, depth) for depth in range(max(map(len, split)) - 1))
    last = torch.zeros_like(weights)
    row = 0
    for span, groups in zip(spans, split, strict=True):
        fill_weights(last, row, span.position, span.count, groups[-1], routing.columns)
        row += span.count
    return RowsActing(step.weights, routing.step(last) if last.any() else None, phases)


def _split(mix: TokenMix, dora: Mapping[str, object]) -> list[list[ActiveUse]]:
    """The uses of a mix up to and with each DoRA, then the rest."""
    groups: list[list[ActiveUse]] = [[]]
    for use in mix.active:
        groups[-1].append(use)
        if use.name in dora:
            groups.append([])
    return groups


def _phase(routing: Routing, spans: Sequence[Span], split: Sequence[list[list[ActiveUse]]], depth: int) -> Phase:
    inside = [len(groups) > depth + 1 for groups in split]
    weights = torch.zeros(sum(span.count for span, here in zip(spans, inside, strict=True) if here), len(routing.columns))
    rows: list[int] = []
    gained: dict[tuple[str, float], list[int]] = {}
    row = 0
    for span, groups, here in zip(spans, split, inside, strict=True):
        if here:
            fill_weights(weights, len(rows), span.position, span.count, groups[depth], routing.columns)
            use = groups[depth][-1]
            first = min(max(use.start - span.position, 0), span.count)
            gained.setdefault((use.name, use.scale), []).extend(range(len(rows) + first, len(rows) + span.count))
            rows += range(row, row + span.count)
        row += span.count
    uses = tuple(
        GainUse(None if len(places) == len(rows) else torch.tensor(places, device=routing.device), routing.dora[name].gains(scale))
        for (name, scale), places in gained.items() if places)
    return Phase(None if len(rows) == row else torch.tensor(rows, device=routing.device), routing.step(weights), uses)

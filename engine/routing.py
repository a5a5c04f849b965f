"""The rank rows of the adapters active in a batch, laid end to end: what every LoRA linear of a forward reads."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.lora import ExpandSlice, LoraLinear, LoraStep
from .slots import FusedPart, Slot, SlotContent


@dataclass(frozen=True, slots=True)
class Routing:
    """One composition of adapters. `layers[i]` has the fused linears of layer i that any of them changes."""

    columns: Mapping[str, int]
    """adapter name -> its column of W"""
    layers: tuple[Mapping[str, LoraLinear], ...]
    head: LoraLinear | None
    """lm_head"""
    column_maps: tuple[Tensor, ...]
    max_rank: int
    copied_bytes: int
    """of its tensors that are no slot's own: the factors of several adapters, copied end to end"""

    def step(self, weights: Tensor) -> LoraStep:
        """The weights W [tokens, adapters] fp32 (see `mix.fill_weights`) for one forward, moved to the device of the factors."""
        return LoraStep(weights.to(self.column_maps[0].device, non_blocking=True), self.column_maps)


class RoutingCache:
    """The last compositions, by the contents of their slots: a change of scales or of tokens builds nothing."""

    def __init__(self, layers: int, slices: Mapping[tuple[int, str], Sequence[int]], device: torch.device, size: int = 2) -> None:
        """`slices`: (layer, fused linear) -> output sizes of its modules. `size` bounds the memory of composed copies."""
        self._layers, self._slices, self._device, self._size = layers, slices, device, size
        self._cached: OrderedDict[tuple[tuple[int, int], ...], Routing] = OrderedDict()

    def get(self, slots: Sequence[Slot]) -> Routing:
        """The composition of the adapters in `slots` (at least one, all filled), in this order."""
        key = tuple((slot.index, slot.generation) for slot in slots)
        routing = self._cached.get(key)
        if routing is None:
            routing = self._cached[key] = self._compose(slots)
            while len(self._cached) > self._size:
                self._cached.popitem(last=False)
        self._cached.move_to_end(key)
        return routing

    @property
    def copied_bytes(self) -> int:
        """What the kept compositions take beside the slots."""
        return sum(routing.copied_bytes for routing in self._cached.values())

    def forget(self, slot: int) -> None:
        """Free every composition that holds a content of the slot with this index."""
        for key in [key for key in self._cached if any(index == slot for index, _ in key)]:
            del self._cached[key]

    def _compose(self, slots: Sequence[Slot]) -> Routing:
        contents = [slot.content for slot in slots if slot.content is not None]
        layouts: dict[tuple[int, ...], int] = {}
        places: list[dict[str, LoraLinear]] = [{} for _ in range(self._layers + 1)]
        for (layer, fused), sizes in self._slices.items():
            parts = [(column, content.parts[layer, fused]) for column, content in enumerate(contents) if (layer, fused) in content.parts]
            if parts:
                places[layer][fused] = _compose_linear(parts, sizes, layouts)
        return Routing(
            columns={slot.adapter: column for column, slot in enumerate(slots)},
            layers=tuple(places[:-1]),
            head=places[-1].get("lm_head"),
            column_maps=tuple(torch.tensor(layout, device=self._device) for layout in layouts),
            max_rank=max(content.rank for content in contents),
            copied_bytes=_copied_bytes(places, contents),
        )


def _copied_bytes(places: Sequence[Mapping[str, LoraLinear]], contents: Sequence[SlotContent]) -> int:
    own = {id(factor) for content in contents for part in content.parts.values() for factor in (part.a, *part.b)}
    used = [factor for place in places for linear in place.values() for factor in (linear.a, *(part.b for part in linear.slices))]
    return sum(factor.nbytes for factor in used if id(factor) not in own)


def _compose_linear(parts: Sequence[tuple[int, FusedPart]], sizes: Sequence[int], layouts: dict[tuple[int, ...], int]) -> LoraLinear:
    """Slice-major rows of `parts` (column of W, share); a single share is used as it lies, without a copy."""
    rows: list[Tensor] = []
    columns: list[int] = []
    slices: list[ExpandSlice] = []
    taken = [0] * len(parts)
    out = 0
    for index, size in enumerate(sizes):
        start, factors = len(columns), []
        for number, (column, part) in enumerate(parts):
            if (b := part.b[index]) is None:
                continue
            rank = b.shape[0]
            rows.append(part.a[taken[number]:taken[number] + rank])
            taken[number] += rank
            columns += [column] * rank
            factors.append(b)
        if factors:
            joined = factors[0] if len(factors) == 1 else torch.cat(factors)
            slices.append(ExpandSlice(start, len(columns), out, out + size, joined))
        out += size
    a = parts[0][1].a if len(parts) == 1 else torch.cat(rows)
    layout = layouts.setdefault(tuple(columns), len(layouts))
    return LoraLinear(a, tuple(slices), layout)



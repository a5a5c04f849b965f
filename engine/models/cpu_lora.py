"""Low-rank deltas of a step of replies on a CPU: A in eight bits where these do, for all adapters of the step at once, B as it lies in
the slots."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.int8_rows import Int8Rows, round_int8
from ...kernels.lora import LoraLinear, LoraStep
from ..routing import Routing
from .acting import ActiveLora, Lap

KEPT = 2
"""compositions"""
MOST_ERROR = 0.02
"""of a row of A by eight bits, relative to its length: three times what they do to rows of trained ones"""


@dataclass(frozen=True, slots=True)
class _Rounded:
    """A LoraLinear whose A is in eight bits, or as it is where these do not do."""

    a: Int8Rows | Tensor
    lora: LoraLinear
    sizes: tuple[int, ...]
    """rank rows of each slice"""


class StepDeltas:
    """The adapters of a step, with its weights, over buffers whose views are kept in `views`."""

    def __init__(self, linears: Mapping[tuple[int, str], _Rounded], step: LoraStep, views: dict[tuple[str, int, int], Tensor]) -> None:
        self._linears, self._step, self._views = linears, step, views

    def add_(self, layer: int, name: str, x: Tensor, y: Tensor, lap: Lap) -> None:
        """Semantics: y += (row_weights * (x A^T)) B of this linear.  x [rows, d_in] bf16, y [rows, d_out] fp32 in place."""
        found = self._linears.get((layer, name))
        if found is None:
            return
        lap("other")
        h = _shrunk(x, found.a).mul_(self._step.row_weights(found.lora))
        lap("shrink")
        slices = found.lora.slices
        for part, rank_rows in zip(slices, (h,) if len(slices) == 1 else h.split(found.sizes, 1), strict=True):
            self._view(name, y, part.out_start, part.out_end).addmm_(rank_rows, part.b)
        lap("expand")

    def _view(self, name: str, y: Tensor, start: int, end: int) -> Tensor:
        if end - start == y.shape[1]:
            return y
        view = self._views.get((name, start, end))
        if view is None:
            view = self._views[name, start, end] = y[:, start:end]
        return view


class CpuLora:
    """The last compositions of adapters, their A rounded when a step first needs them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Routing, dict[tuple[int, str], _Rounded]]] = OrderedDict()

    def begin(self, lora: ActiveLora, views: dict[tuple[str, int, int], Tensor]) -> StepDeltas:
        """`views`: those of the step's buffers."""
        routing = lora.routing
        if id(routing) not in self._kept:
            self._kept[id(routing)] = routing, {
                (index, name): _Rounded(_rounded(linear.a), linear, tuple(part.row_end - part.row_start for part in linear.slices))
                for index, layer in enumerate(routing.layers[:-1]) for name, linear in layer.items()}
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(id(routing))
        return StepDeltas(self._kept[id(routing)][1], lora.body.step, views)


def _rounded(a: Tensor) -> Int8Rows | Tensor:
    """`a` in eight bits; as it is where a few numbers of a row are so large that its others would be lost."""
    found = round_int8(a)
    error = found.scales.float() * (a.shape[1] / 12) ** 0.5  # numbers are off by 1 / sqrt(12) of a scale, on the whole
    return a if bool((error > MOST_ERROR * a.norm(dim=1)).any()) else found


def _shrunk(x: Tensor, a: Int8Rows | Tensor) -> Tensor:
    """fp32 [rows, K], which may be written to.  x [rows, d_in] bf16"""
    if isinstance(a, Int8Rows):
        return torch._weight_int8pack_mm(x, a.numbers, a.scales).float()
    return torch.mm(x.float(), a.t())


def is_low_rank(lora: ActiveLora) -> bool:
    """Whether a step's adapters are taken so: low rank and nothing more, on the linears of layers."""
    routing, acting = lora.routing, lora.body
    more = routing.changes_head or routing.embedding or any(routing.vectors) or acting.phases or acting.step is None
    biased = any(linear.bias is not None for layer in routing.layers for linear in layer.values())
    return not (more or biased)

"""Low-rank deltas of a step of replies on a CPU: rank rows in eight bits, two products a linear, for all adapters of the step at once."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...kernels.int8_rows import Int8Rows, round_int8
from ...kernels.lora import ExpandSlice, LoraLinear
from ..routing import Routing
from .acting import ActiveLora, Lap

JOINED_ELEMENTS = 1 << 17
"""up to which the B of all slices is one matrix, with zeros where a slice does not act: to read these takes less than another product"""
KEPT = 2
"""compositions"""
WIDTH = 32
"""rank rows are filled up to multiples of it, as torch's product needs them"""


@dataclass(frozen=True, slots=True)
class _Expand:
    """`b` [outputs, rank rows] acts from the rank rows [first, end) on the outputs [out_start, out_end)."""

    first: int
    end: int
    out_start: int
    out_end: int
    b: Int8Rows


@dataclass(frozen=True, slots=True)
class _Rounded:
    """A LoraLinear in eight bits. `columns` int64: its rank rows' columns of W, filled up with any."""

    a: Int8Rows
    expands: tuple[_Expand, ...]
    layout: int
    columns: Tensor


class StepWeights:
    """The rounded adapters of a step, with its weights."""

    def __init__(self, layers: Mapping[tuple[int, str], _Rounded], weights: Tensor) -> None:
        self._layers, self._weights = layers, weights
        self._by_layout: dict[int, Tensor] = {}

    def add_(self, layer: int, name: str, x: Tensor, y: Tensor, lap: Lap) -> None:
        """Semantics: y += (row_weights * (x A^T)) B of this linear.  x [rows, d_in] bf16, y [rows, d_out] fp32 in place."""
        lora = self._layers.get((layer, name))
        if lora is None:
            return
        lap("other")
        h = torch._weight_int8pack_mm(x, lora.a.numbers, lora.a.scales).mul_(self._row_weights(lora))
        lap("shrink")
        for part in lora.expands:
            whole = part.end - part.first == h.shape[1]
            delta = torch._weight_int8pack_mm(h if whole else h[:, part.first : part.end].contiguous(), part.b.numbers, part.b.scales)
            (y if delta.shape[1] == y.shape[1] else y[:, part.out_start : part.out_end]).add_(delta)
        lap("expand")

    def _row_weights(self, lora: _Rounded) -> Tensor:
        """bf16 [rows, rank rows] or [rows, 1]"""
        if self._weights.shape[1] == 1:
            return self._weights
        found = self._by_layout.get(lora.layout)
        if found is None:
            found = self._by_layout[lora.layout] = self._weights.index_select(1, lora.columns)
        return found


class CpuLora:
    """The last compositions of adapters, rounded when a step first needs them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Routing, dict[tuple[int, str], _Rounded]]] = OrderedDict()

    def begin(self, lora: ActiveLora) -> StepWeights:
        routing = lora.routing
        if id(routing) not in self._kept:
            places = enumerate(routing.layers[:-1])
            self._kept[id(routing)] = routing, {
                (index, name): _rounded(linear, routing) for index, layer in places for name, linear in layer.items()}
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(id(routing))
        return StepWeights(self._kept[id(routing)][1], lora.body.step.weights.bfloat16())


def lora_obstacle(lora: ActiveLora) -> str:
    """Why a step's adapters are not rounded, "" where they are: low rank, on the linears of layers."""
    routing, acting = lora.routing, lora.body
    more = routing.changes_head or routing.embedding or any(routing.vectors) or acting.phases or acting.step is None
    biased = any(linear.bias is not None for layer in routing.layers for linear in layer.values())
    return "adapters have more than low rank" if more or biased else ""


def _rounded(lora: LoraLinear, routing: Routing) -> _Rounded:
    width = max(part.out_end for part in lora.slices)
    joined = len(lora.slices) == 1 or lora.a.shape[0] * width <= JOINED_ELEMENTS
    sizes = [part.row_end - part.row_start for part in lora.slices]
    starts = list(accumulate(sizes if joined else map(_filled, sizes), initial=0))
    rows = _filled(starts.pop())
    a, places = lora.a.new_zeros(rows, lora.a.shape[1]), torch.zeros(rows, dtype=torch.int64)
    for start, size, part in zip(starts, sizes, lora.slices, strict=True):
        a[start : start + size] = lora.a[part.row_start : part.row_end]
        places[start : start + size] = routing.column_maps[lora.layout][part.row_start : part.row_end]
    if joined:
        b = a.new_zeros(width, rows)
        for start, size, part in zip(starts, sizes, lora.slices, strict=True):
            b[part.out_start : part.out_end, start : start + size] = part.b.t()
        expands = [_Expand(0, rows, 0, width, round_int8(b))]
    else:
        expands = [_expand(start, size, part) for start, size, part in zip(starts, sizes, lora.slices, strict=True)]
    return _Rounded(round_int8(a), tuple(expands), lora.layout, places)


def _expand(start: int, size: int, part: ExpandSlice) -> _Expand:
    b = part.b.new_zeros(part.b.shape[1], _filled(size))
    b[:, :size] = part.b.t()
    return _Expand(start, start + b.shape[1], part.out_start, part.out_end, round_int8(b))


def _filled(rows: int) -> int:
    return -(-rows // WIDTH) * WIDTH

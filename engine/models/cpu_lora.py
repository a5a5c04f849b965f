"""Low-rank deltas of a step of replies on a CPU, as its compiled step reads them: in bf16 where that is what was trained."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.rank_rows import Ranks
from ...kernels.lora import ExpandSlice, LoraLinear
from ..routing import Routing
from .acting import ActiveLora

KEPT = 2
"""compositions"""
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class _Composition:
    """The parts of Ranks that no step changes, of a routing."""

    routing: Routing
    places: np.ndarray
    slices: np.ndarray
    layouts: tuple[LoraLinear, ...]
    """one of each, in the order of their weights"""
    most: int
    """rank rows of a linear"""
    factors: tuple[Tensor, ...]
    """whose addresses stand in `places` and `slices`"""


class CpuLora:
    """The last compositions of adapters, made ready when a step first needs them."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._none = Ranks(np.zeros((layers, 4, 6), np.int64), np.zeros((0, 6), np.int64), np.zeros(0, np.float32))
        self._kept: OrderedDict[int, _Composition] = OrderedDict()

    def ranks(self, lora: ActiveLora | None) -> tuple[Ranks, int]:
        """The deltas of a step, and the most rank rows of a linear. They are valid until two other compositions were asked for."""
        if lora is None:
            return self._none, 0
        key = id(lora.routing)
        if key not in self._kept:
            self._kept[key] = _compose(lora.routing, self._layers)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        found, step = self._kept[key], lora.body.step
        weights = [step.row_weights(linear).expand(-1, linear.a.shape[0]).reshape(-1) for linear in found.layouts]
        return Ranks(found.places, found.slices, torch.cat(weights).numpy()), found.most


def _compose(routing: Routing, layers: int) -> _Composition:
    places, slices, factors = np.zeros((layers, 4, 6), np.int64), [], []
    starts: dict[int, int] = {}
    layouts: list[LoraLinear] = []
    columns = routing.column_maps
    before = 0
    for index in range(layers):
        for number, name in enumerate(LINEARS):
            linear = routing.layers[index].get(name)
            if linear is None:
                continue
            if linear.layout not in starts:
                starts[linear.layout] = before
                layouts.append(linear)
                before += linear.a.shape[0]
            a = _short(linear.a)
            parts = [(part, _short(part.b)) for part in linear.slices]
            first = len(slices)
            slices += [piece for part, b in parts for piece in _pieces(part, b, columns[linear.layout].tolist())]
            places[index, number] = (a.data_ptr(), a.shape[0], a.dtype == torch.bfloat16, starts[linear.layout], first, len(slices))
            factors += [a, *(b for _, b in parts)]
    most = max((linear.a.shape[0] for linear in layouts), default=0)
    return _Composition(routing, places, np.array(slices, np.int64).reshape(-1, 6), tuple(layouts), most, tuple(factors))


def _pieces(part: ExpandSlice, b: Tensor, columns: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Entries of Ranks.slices: the rank rows of each adapter by themselves, so that their sums are the same beside others."""
    rows = range(part.row_start, part.row_end)
    for _, same in groupby(rows, key=lambda row: columns[row]):
        own = list(same)
        address = b[own[0] - part.row_start].data_ptr()
        yield own[0], own[-1] + 1, part.out_start, part.out_end, address, b.dtype == torch.bfloat16


def _short(factor: Tensor) -> Tensor:
    """`factor` in bf16 where nothing is lost by it: half the memory to read; else fp32."""
    short, whole = factor.bfloat16(), factor.float()
    return short.contiguous() if torch.equal(short.float(), whole) else whole.contiguous()


def is_low_rank(lora: ActiveLora) -> bool:
    """Whether a step's adapters are taken so: low rank and nothing more, on the linears of layers."""
    routing, acting = lora.routing, lora.body
    more = routing.changes_head or routing.embedding or any(routing.vectors) or acting.phases or acting.step is None
    biased = any(linear.bias is not None for layer in routing.layers for linear in layer.values())
    return not (more or biased)

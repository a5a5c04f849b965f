"""Low-rank deltas of a step of replies on a CPU, as its compiled step reads them: in bf16 where that is what was trained."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.rank_rows import TILE, Ranks
from ..routing import Routing
from ..slots import FusedPart, SlotContent
from .acting import ActiveLora
from .facts import ModelFacts, linear_layout, module_shapes

T, M = TypeVar("T"), TypeVar("M")
Parts = Mapping[tuple[int, str], "_Factors"]
"""of a content, by layer and fused linear"""


@dataclass(frozen=True, slots=True)
class _Factors:
    """A FusedPart as the step reads it."""

    a: Tensor
    b: tuple[tuple[int, int, Tensor], ...]
    """of each module: its place, its rank rows, and B in tiles"""


@dataclass(frozen=True, slots=True)
class _Table:
    """The parts of Ranks that no step changes, of a routing."""

    ranks: Ranks
    most: int
    """rank rows of a linear"""
    ready: Sequence[tuple[int, Parts]]
    """whose addresses stand in `ranks`"""


class _Made(Generic[T, M]):
    """What was made of objects, for as long as these are there."""

    def __init__(self, make: Callable[[T], M]) -> None:
        self._make = make
        self._made: dict[int, M] = {}

    def of(self, thing: T) -> M:
        key = id(thing)
        if key not in self._made:
            self._made[key] = self._make(thing)
            weakref.finalize(thing, self._made.pop, key, None).atexit = False
        return self._made[key]


class CpuLora:
    """The adapters that acted last, made ready when a step first needs them."""

    def __init__(self, facts: ModelFacts) -> None:
        self._layers = facts.layers
        shapes = module_shapes(facts)
        self._sizes = {fused: [shapes[f"layers.0.{module}"][0] for module in modules] for fused, modules in linear_layout(facts).items()}
        self._none = self._table([])
        self._contents, self._tables, self._low_rank = _Made(self._ready), _Made(self._compose), _Made(_is_low_rank)

    def takes(self, lora: ActiveLora) -> bool:
        """Whether a step's adapters are low rank and nothing more, on the linears of layers."""
        return not lora.body.phases and lora.body.step is not None and self._low_rank.of(lora.routing)

    def ranks(self, lora: ActiveLora | None) -> tuple[Ranks, int]:
        """The deltas of a step, and the most rank rows of a linear."""
        if lora is None:
            return self._none.ranks, 0
        found = self._tables.of(lora.routing)
        return found.ranks._replace(weights=lora.body.step.weights.numpy()), found.most

    def _ready(self, content: SlotContent) -> Parts:
        return {place: _factors(part) for place, part in content.parts.items() if place[0] < self._layers}

    def _compose(self, routing: Routing) -> _Table:
        return self._table([(column, self._contents.of(routing.contents[name])) for name, column in routing.columns.items()])

    def _table(self, ready: Sequence[tuple[int, Parts]]) -> _Table:
        places, a, b = np.zeros((self._layers, len(self._sizes), 5), np.int64), [], []
        for layer in range(self._layers):
            for number, (fused, sizes) in enumerate(self._sizes.items()):
                rows, first_a, first_b = 0, len(a), len(b)
                for column, parts in ready:
                    found = parts.get((layer, fused))
                    if found is not None:
                        end = rows + found.a.shape[0]
                        a.append((rows, end, found.a.data_ptr(), found.a.dtype == torch.bfloat16, column, 0, 0))
                        b += _modules(found, rows, column, sizes)
                        rows = end
                places[layer, number] = rows, first_a, len(a), first_b, len(b)
        tables = (np.array(rows, np.int64).reshape(-1, 7) for rows in (a, b))
        return _Table(Ranks(places, *tables, np.zeros((0, 0), np.float32)), int(places[:, :, 0].max()), ready)


def _is_low_rank(routing: Routing) -> bool:
    more = routing.changes_head or routing.embedding or any(routing.vectors)
    return not more and all(linear.bias is None for layer in routing.layers for linear in layer.values())


def _modules(found: _Factors, first: int, column: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Entries of Ranks.b of a fused linear whose modules have `sizes` outputs, where its rank rows begin at `first`."""
    for module, rows, b in found.b:
        start = sum(sizes[:module])
        yield first, first + rows, b.data_ptr(), b.dtype == torch.bfloat16, column, start, start + sizes[module]
        first += rows


def _factors(part: FusedPart) -> _Factors:
    return _Factors(_short(part.a), tuple((module, b.shape[0], _short(_tiles(b))) for module, b in enumerate(part.b) if b is not None))


def _tiles(b: Tensor) -> Tensor:
    """[rows, outputs] -> [tiles of outputs, rows, TILE], zeros behind the last output."""
    tiles = -(-b.shape[1] // TILE)
    return torch.nn.functional.pad(b, (0, tiles * TILE - b.shape[1])).view(b.shape[0], tiles, TILE).transpose(0, 1)


def _short(factor: Tensor) -> Tensor:
    """`factor`, contiguous, in bf16 where nothing is lost by it: half the memory to read; else in fp32."""
    short, whole = factor.bfloat16(), factor.float()
    return (short if torch.equal(short.float(), whole) else whole).contiguous()

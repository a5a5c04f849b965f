"""Low-rank deltas of a step of replies on a CPU, as its compiled step reads them: in bf16 where that is what was trained."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.rank_rows import TILE, Ranks
from ..routing import Routing
from ..slots import FusedPart, SlotContent
from .acting import ActiveLora
from .facts import ModelFacts, linear_layout, module_shapes

KEPT_TABLES, KEPT_CONTENTS = 2, 8
"""compositions; contents of slots, if not more act at once"""


@dataclass(frozen=True, slots=True)
class _Factors:
    """A FusedPart as the step reads it."""

    a: Tensor
    b: tuple[tuple[int, int, Tensor], ...]
    """of each module: its place, its rank rows, and B in tiles"""


@dataclass(frozen=True, slots=True)
class _Table:
    """The parts of Ranks that no step changes, of a routing."""

    routing: Routing
    ranks: Ranks
    most: int
    """rank rows of a linear"""


class CpuLora:
    """The adapters that acted last, made ready when a step first needs them."""

    def __init__(self, facts: ModelFacts) -> None:
        self._layers = facts.layers
        shapes = module_shapes(facts)
        self._sizes = {fused: [shapes[f"layers.0.{module}"][0] for module in modules] for fused, modules in linear_layout(facts).items()}
        self._none = self._table([], None)
        self._contents: OrderedDict[int, tuple[SlotContent, Mapping[tuple[int, str], _Factors]]] = OrderedDict()
        self._tables: OrderedDict[int, _Table] = OrderedDict()

    def ranks(self, lora: ActiveLora | None) -> tuple[Ranks, int]:
        """The deltas of a step, and the most rank rows of a linear."""
        if lora is None:
            return self._none.ranks, 0
        key = id(lora.routing)
        if key not in self._tables:
            ready = [(column, self._ready(lora.routing.contents[name])) for name, column in lora.routing.columns.items()]
            self._tables[key] = self._table(ready, lora.routing)
            _forget(self._contents, max(KEPT_CONTENTS, len(ready)))
            _forget(self._tables, KEPT_TABLES)
        self._tables.move_to_end(key)
        found = self._tables[key]
        return found.ranks._replace(weights=lora.body.step.weights.numpy()), found.most

    def _ready(self, content: SlotContent) -> Mapping[tuple[int, str], _Factors]:
        key = id(content)
        if key not in self._contents:
            self._contents[key] = content, {place: _factors(part) for place, part in content.parts.items() if place[0] < self._layers}
        self._contents.move_to_end(key)
        return self._contents[key][1]

    def _table(self, ready: Sequence[tuple[int, Mapping[tuple[int, str], _Factors]]], routing: Routing | None) -> _Table:
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
        return _Table(routing, Ranks(places, *tables, np.zeros((0, 0), np.float32)), int(places[:, :, 0].max()))


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


def _forget(kept: OrderedDict[int, object], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)


def is_low_rank(lora: ActiveLora) -> bool:
    """Whether a step's adapters are taken so: low rank and nothing more, on the linears of layers."""
    routing, acting = lora.routing, lora.body
    more = routing.changes_head or routing.embedding or any(routing.vectors) or acting.phases or acting.step is None
    biased = any(linear.bias is not None for layer in routing.layers for linear in layer.values())
    return not (more or biased)

"""The low-rank part of an adapter as pages hold it, made in RAM: cast, scaled and laid out, so that only copies remain to be done."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..kernels.rank_pages import PAGE_ROWS
from .finite import check_finite
from .models.facts import ModelFacts, linear_layout, module_shapes

if TYPE_CHECKING:
    from .adapters.adapter import Adapter, AdapterWeights, LoraPair


@dataclass(frozen=True, slots=True)
class PageShape:
    """What a page of one kind of fused linear holds: 16 rank rows for each slice of each of its layers."""

    modules: tuple[tuple[str, ...], ...]
    """canonical names by layer and slice"""
    d_in: int
    ends: tuple[int, ...]
    """where the outputs of each slice end"""

    @property
    def a(self) -> tuple[int, ...]:
        return len(self.modules), len(self.ends), PAGE_ROWS, self.d_in

    @property
    def b(self) -> tuple[int, ...]:
        return len(self.modules), self.ends[-1], PAGE_ROWS

    @property
    def numbers(self) -> int:
        return len(self.modules) * PAGE_ROWS * (len(self.ends) * self.d_in + self.ends[-1])


@dataclass(frozen=True, slots=True, eq=False)
class PageImage:
    """An adapter's pages by kind of fused linear, in the dtype of the base; alpha/r is folded into B."""

    a: Mapping[str, Tensor]
    """[pages, layers, slices, 16, d_in]"""
    b: Mapping[str, Tensor]
    """[pages, layers, d_out, 16]"""
    ranks: Mapping[str, np.ndarray]
    """[layers, slices], 0 where the adapter changes nothing"""

    @property
    def counts(self) -> dict[str, int]:
        return {kind: len(pages) for kind, pages in self.a.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.a.values(), *self.b.values()))


def page_shapes(facts: ModelFacts) -> dict[str, PageShape]:
    """By kind of fused linear; lm_head, the last, has one layer."""
    shapes = module_shapes(facts)
    layout = {kind: tuple(tuple(f"layers.{layer}.{module}" for module in modules) for layer in range(facts.layers))
              for kind, modules in linear_layout(facts).items()}
    return {kind: PageShape(modules, shapes[modules[0][0]][1], tuple(np.cumsum([shapes[module][0] for module in modules[0]]).tolist()))
            for kind, modules in (layout | {"lm_head": (("lm_head",),)}).items()}


def page_needs(weights: AdapterWeights, shapes: Mapping[str, PageShape]) -> dict[str, int]:
    """Pages of each kind that the adapter changes: its greatest rank there in pages of 16 rows."""
    return {kind: pages_for(int(ranks.max())) for kind, shape in shapes.items() if (ranks := _ranks(weights, shape)).any()}


def pages_for(rank: int) -> int:
    return -(-rank // PAGE_ROWS)


def build_image(adapter: Adapter, shapes: Mapping[str, PageShape], dtype: torch.dtype, pinned: bool) -> PageImage:
    """Any thread may. `pinned`: in memory that a CUDA device reads by itself.

    Raises AdapterError for numbers that are too large for the dtype.
    """
    needs = page_needs(adapter.weights, shapes)
    memory = torch.zeros(sum(count * shapes[kind].numbers for kind, count in needs.items()), dtype=dtype, pin_memory=pinned)
    a, b, ranks, taken = {}, {}, {}, 0
    for kind, count in needs.items():
        shape = shapes[kind]
        ranks[kind] = _ranks(adapter.weights, shape)
        for factors, size in ((a, shape.a), (b, shape.b)):
            numbers = count * int(np.prod(size))
            factors[kind] = memory[taken:taken + numbers].view(count, *size)
            taken += numbers
        _write(adapter, shape, ranks[kind], a[kind], b[kind])
    return PageImage(a, b, ranks)


def _ranks(weights: AdapterWeights, shape: PageShape) -> np.ndarray:
    """[layers, slices]; a head with more outputs than the base has is not for pages."""
    widths = np.diff(shape.ends, prepend=0)
    pairs = [[weights.modules.get(module) for module in modules] for modules in shape.modules]
    return np.array([[pair.rank if pair is not None and pair.b.shape[0] == width else 0 for pair, width in zip(row, widths, strict=True)]
                     for row in pairs])


def _write(adapter: Adapter, shape: PageShape, ranks: np.ndarray, a: Tensor, b: Tensor) -> None:
    for layer, modules in enumerate(shape.modules):
        first = 0
        for index, (module, end) in enumerate(zip(modules, shape.ends, strict=True)):
            if ranks[layer, index]:
                what = f"the weights of {module} times their effective scale"
                rows, columns = _factors(adapter, adapter.modules[module], a.dtype, what)
                for page, (some_rows, some_columns) in enumerate(zip(rows.split(PAGE_ROWS), columns.split(PAGE_ROWS, 1), strict=True)):
                    a[page, layer, index, :len(some_rows)] = some_rows
                    b[page, layer, first:end, :len(some_rows)] = some_columns
            first = end


def _factors(adapter: Adapter, pair: LoraPair, dtype: torch.dtype, what: str) -> tuple[Tensor, Tensor]:
    """A, and scaling * B scaled before it is rounded."""
    return (check_finite(pair.a.to(dtype), adapter, what), check_finite(pair.b.float().mul(pair.scaling).to(dtype), adapter, what))

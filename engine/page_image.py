"""The low-rank part of an adapter as pages hold it, made in RAM: cast, scaled and laid out, so that only copies remain to be done."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ..kernels.rank_pages import PAGE_ROWS
from .finite import check_finite
from .models.facts import ModelFacts, linear_layout, module_shapes

if TYPE_CHECKING:
    from .adapters.adapter import Adapter, AdapterWeights

PART_BYTES = 2 << 20
"""of pinned memory that are asked for at once: the device takes no launches meanwhile, nearly a millisecond for each MiB"""


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
class ImagePart:
    """Consecutive layers of one factor of one page."""

    kind: str
    """of fused linear"""
    factor: Literal["a", "b"]
    page: int
    """among those that the adapter takes of the kind"""
    first: int
    """layer"""
    numbers: Tensor
    """[layers, slices, 16, d_in] of A, [layers, d_out, 16] of B"""


@dataclass(frozen=True, slots=True, eq=False)
class PageImage:
    """An adapter's pages, in the dtype of the base; alpha/r is folded into B."""

    parts: tuple[ImagePart, ...]
    counts: Mapping[str, int]
    """pages by kind of fused linear"""
    ranks: Mapping[str, np.ndarray]
    """[layers, slices], 0 where the adapter changes nothing"""

    @property
    def nbytes(self) -> int:
        return sum(part.numbers.nbytes for part in self.parts)


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
    ranks = {kind: found for kind, shape in shapes.items() if (found := _ranks(adapter.weights, shape)).any()}
    counts = {kind: pages_for(int(found.max())) for kind, found in ranks.items()}
    parts: list[ImagePart] = []
    for kind, count in counts.items():
        pages = [tuple(_empty(kind, factor, page, shapes[kind], dtype, pinned) for factor in ("a", "b")) for page in range(count)]
        _write(adapter, shapes[kind], ranks[kind], pages)
        parts += (part for page in pages for factor in page for part in factor)
    return PageImage(tuple(parts), counts, ranks)


def _empty(kind: str, factor: Literal["a", "b"], page: int, shape: PageShape, dtype: torch.dtype, pinned: bool) -> list[ImagePart]:
    """All layers of a page, each part with the same number of them but the last, zero."""
    layers, *size = getattr(shape, factor)
    most = max(1, PART_BYTES // (math.prod(size) * dtype.itemsize))
    return [ImagePart(kind, factor, page, first, torch.zeros(min(most, layers - first), *size, dtype=dtype, pin_memory=pinned))
            for first in range(0, layers, most)]


def _ranks(weights: AdapterWeights, shape: PageShape) -> np.ndarray:
    """[layers, slices]; a head with more outputs than the base has is not for pages."""
    widths = np.diff(shape.ends, prepend=0)
    pairs = [[weights.modules.get(module) for module in modules] for modules in shape.modules]
    return np.array([[pair.rank if pair is not None and pair.b.shape[0] == width else 0 for pair, width in zip(row, widths, strict=True)]
                     for row in pairs])


def _write(adapter: Adapter, shape: PageShape, ranks: np.ndarray, pages: Sequence[tuple[list[ImagePart], list[ImagePart]]]) -> None:
    for layer, modules in enumerate(shape.modules):
        for index, module in enumerate(modules):
            if not ranks[layer, index]:
                continue
            first, end = (0, *shape.ends)[index], shape.ends[index]
            rows, columns = _factors(adapter, module, pages[0][0][0].numbers.dtype)
            for (a, b), some_rows, some_columns in zip(pages, rows.split(PAGE_ROWS), columns.split(PAGE_ROWS, 1), strict=False):
                _layer(a, layer)[index, :len(some_rows)] = some_rows
                _layer(b, layer)[first:end, :len(some_rows)] = some_columns


def _layer(parts: Sequence[ImagePart], layer: int) -> Tensor:
    each = len(parts[0].numbers)
    return parts[layer // each].numbers[layer % each]


def _factors(adapter: Adapter, module: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A, and scaling * B scaled before it is rounded."""
    pair, what = adapter.modules[module], f"the weights of {module} times their effective scale"
    return check_finite(pair.a.to(dtype), adapter, what), check_finite(pair.b.float().mul(pair.scaling).to(dtype), adapter, what)

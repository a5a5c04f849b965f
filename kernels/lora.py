"""The low-rank part of a linear, for many adapters in one batch: shrink to the rank rows, weigh them, expand.

The rank rows of the active adapters lie end to end (`A_cat`); a weight for each token and row says how much
of it acts. Zeros there are how a token ignores an adapter, so mixed batches need no grouping.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .lora_tiles import RowTiles


@dataclass(frozen=True, slots=True)
class ExpandSlice:
    """Rank rows [row_start, row_end) act on outputs [out_start, out_end) through `b` [rows, outputs]."""

    row_start: int
    row_end: int
    out_start: int
    out_end: int
    b: Tensor


@dataclass(frozen=True, slots=True)
class RowVectors:
    """A vector for each of some adapters: `values` [n, d] belong to the columns `columns` [n] int64 of the weights."""

    columns: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """All active rank rows of one (fused) linear. `layout` names the column map that its rows share with other linears."""

    a: Tensor
    """[K, d_in], slice-major; within a slice by adapter"""
    slices: tuple[ExpandSlice, ...]
    layout: int
    bias: RowVectors | None = None
    """scaling * bias of lora_B, [n, d_out]"""


class LoraStep:
    """The weights of one forward.

    `weights` [tokens, adapters] fp32; `columns[layout]` [K] int64 maps a linear's rank rows to adapters.
    Linears that share a layout share one gathered [tokens, K]. `tiles`: the same for rank rows that lie in pages.
    """

    def __init__(self, weights: Tensor, columns: Sequence[Tensor], tiles: RowTiles | None = None) -> None:
        self.weights, self.columns, self.tiles = weights, columns, tiles
        self._gathered: dict[int, Tensor] = {}

    def row_weights(self, lora: LoraLinear) -> Tensor:
        """[tokens, K] fp32 for `lora`; [tokens, 1] when one adapter is active."""
        if self.weights.shape[1] == 1:
            return self.weights
        gathered = self._gathered.get(lora.layout)
        if gathered is None:
            gathered = self._gathered[lora.layout] = self.weights.index_select(1, self.columns[lora.layout])
        return gathered


def lora_shrink(x: Tensor, a: Tensor, row_weights: Tensor) -> Tensor:
    """Semantics: h[t, k] = row_weights[t, k] * sum_d x[t, d] a[k, d].

    x [T, d_in] and a [K, d_in] of one dtype, row_weights [T, K] or [T, 1] fp32; weighed in fp32, returned in x's dtype.
    """
    h = linear(x, a)
    if h.dtype == torch.float32:
        return h.mul_(row_weights)
    return (h.float().mul_(row_weights)).to(x.dtype)


def vector_weights(weights: Tensor, vectors: RowVectors) -> Tensor:
    """[T, n] fp32: of the weights [T, adapters], those of the adapters that have a vector."""
    return weights if weights.shape[1] == vectors.values.shape[0] else weights.index_select(1, vectors.columns)


def add_vectors_(y: Tensor, weights: Tensor, vectors: RowVectors) -> None:
    """Semantics: y[t] += sum_i weights[t, columns[i]] values[i].

    y [T, d] is changed in place; weights [T, adapters] fp32; values in y's dtype. Rows whose weights are zero stay as they are.
    """
    y.addmm_(vector_weights(weights, vectors).to(y.dtype), vectors.values)


def lora_expand_(y: Tensor, h: Tensor, slices: tuple[ExpandSlice, ...]) -> None:
    """Semantics, for every slice s: y[t, out_s] += sum_k h[t, rows_s] b_s[k, out].

    y [T, d_out] is changed in place; h [T, K] and b of y's dtype. Rows of h that are zero leave y as it is.
    """
    if len(slices) == 1 and slices[0].out_end - slices[0].out_start == y.shape[1]:
        y.addmm_(h, slices[0].b)
        return
    for part in slices:
        y[:, part.out_start:part.out_end].addmm_(h[:, part.row_start:part.row_end], part.b)

"""Rank rows of many adapters in pages of a pool, and what of them acts in a step.

A page holds 16 rank rows of one kind of fused linear, for all layers that have it. An adapter of rank r takes ceil(r / 16) pages of
each kind that it changes, none of the others; the rows that it lacks are zero. Which pages act, in which order, and how much on each
row of a step are numbers in device memory: a captured graph of a step serves every composition of adapters.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_ROWS = 16
"""one k-step of the tensor cores for 16-bit numbers: what other pages hold adds exact zeros to a row that they do not act on"""
MAX_PAGES = 64
"""active in one linear of a step; more adapters or ranks take the path without graphs"""


@dataclass(frozen=True, slots=True)
class RankPool:
    """Pages of one kind of fused linear, in the dtype of the base. alpha/r is folded into `b`."""

    a: Tensor
    """[pages, layers, slices, 16, d_in]"""
    b: Tensor
    """[pages, layers, d_out, 16]"""
    ends: tuple[int, ...]
    """where the outputs of each slice (q, k, v; gate, up) end; the last is d_out"""

    @property
    def slices(self) -> int:
        return len(self.ends)


@dataclass(frozen=True, slots=True)
class RankRows:
    """What acts in one linear of one layer of a step."""

    pool: RankPool
    layer: int
    pages: Tensor
    """int32 [1 + 2 * MAX_PAGES]: how many pages act; their numbers; from 1 + MAX_PAGES on the column of `weights` of each"""
    weights: Tensor
    """fp32 [rows, adapters]: scale of each adapter on each row of the step, 0 where it does not act"""


def rank_delta(x: Tensor, rank: RankRows) -> Tensor:
    """Semantics: y[t, o] = sum over active pages i and their rows r of b[i, o, r] * w[t, i] * sum_d a[i, s(o), r, d] x[t, d].

    x [rows, d_in]; y [rows, d_out] fp32, products and sums in fp32 (float64 where x is); s(o) is the slice of output o, w the weight of
    the page's adapter.
    """
    count, wide = int(rank.pages[0]), torch.promote_types(x.dtype, torch.float32)
    pool, layer, x = rank.pool, rank.layer, x.to(wide)
    y = torch.zeros(x.shape[0], pool.ends[-1], dtype=wide, device=x.device)
    for place in range(1, 1 + count):
        page, column = int(rank.pages[place]), int(rank.pages[place + MAX_PAGES])
        weight, first = rank.weights[:, column, None].to(wide), 0
        for index, end in enumerate(pool.ends):
            h = (x @ pool.a[page, layer, index].to(wide).T) * weight
            y[:, first:end] += h @ pool.b[page, layer, first:end].to(wide).T
            first = end
    return y

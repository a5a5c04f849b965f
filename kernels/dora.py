"""DoRA: the rows of W + s C brought to trained lengths (C = scaling * B A), for any scale s without another pass over W.

|W + s C|^2 = <W,W> + 2 s <W,C> + s^2 <C,C>, row by row: three numbers a row are kept (section 4 of arXiv 2402.09353).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .weights import Weight, row_chunks


@dataclass(frozen=True, slots=True)
class RowStats:
    """Of every row of a matrix W: its trained length, and the inner products from which its length at any scale follows.

    All [rows] fp64 on one device. `weight_delta` is <W,C>, `delta` is <C,C>.
    """

    magnitude: Tensor
    weight: Tensor
    weight_delta: Tensor
    delta: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.magnitude, self.weight, self.weight_delta, self.delta))


@dataclass(frozen=True, slots=True)
class LowRank:
    """C = scaling * b a for the rows [start, start + b.shape[0]) of a matrix. a [r, d_in] and b [rows, r] fp32."""

    start: int
    a: Tensor
    b: Tensor
    scaling: float


def row_squares(weight: Weight) -> Tensor:
    """Semantics: y[o] = sum_i weight[o, i]^2, fp64."""
    return torch.cat([chunk.square().sum(1, dtype=torch.float64) for _, chunk in row_chunks(weight)])


def row_products(weight: Weight, parts: Sequence[LowRank]) -> list[Tensor]:
    """Semantics, for every part: y[o] = <weight[start + o], C[o]>, fp64. One pass over `weight`, which is never held whole in fp32."""
    products = [part.b.new_zeros(part.b.shape[0], dtype=torch.float64) for part in parts]
    for first, chunk in row_chunks(weight):
        for part, out in zip(parts, products, strict=True):
            low, high = max(first, part.start), min(first + chunk.shape[0], part.start + part.b.shape[0])
            if low < high:
                b = part.b[low - part.start:high - part.start]
                shrunk = chunk[low - first:high - first] @ part.a.T
                out[low - part.start:high - part.start] = (shrunk * b).sum(1, dtype=torch.float64) * part.scaling
    return products


def column_squares(weight: Weight) -> Tensor:
    """Semantics: y[i] = sum_o weight[o, i]^2, fp64: the lengths of DoRA on an embedding are those of its columns."""
    total = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for _, chunk in row_chunks(weight):
        total += chunk.square().sum(0, dtype=torch.float64)
    return total


def column_products(weight: Weight, part: LowRank) -> Tensor:
    """Semantics: y[i] = sum_o weight[o, i] C[i, o], fp64; `part.a` [r, rows], `part.b` [columns, r]."""
    shrunk = torch.zeros(part.b.shape, dtype=torch.float64, device=part.b.device)
    for first, chunk in row_chunks(weight):
        shrunk += chunk.T @ part.a[:, first:first + chunk.shape[0]].T
    return (shrunk * part.b).sum(1) * part.scaling


def delta_squares(part: LowRank) -> Tensor:
    """Semantics: y[o] = <C[o], C[o]>, fp64, from the r x r products of `a`, or from C where that is the smaller of the two."""
    if part.a.shape[0] ** 2 > part.b.shape[0] * part.a.shape[1]:
        return (part.b @ part.a).square().sum(1, dtype=torch.float64) * part.scaling**2
    gram = (part.a @ part.a.T).double()
    b = part.b.double()
    return ((b @ gram) * b).sum(1).clamp_min_(0) * part.scaling**2


def row_gains(stats: RowStats, scale: float) -> Tensor:
    """Semantics: g[o] = magnitude[o] / |W[o] + scale C[o]|, fp32; 1 where that row is zero, as it stays zero whatever its gain."""
    squares = stats.weight + 2 * scale * stats.weight_delta + scale * scale * stats.delta
    gains = stats.magnitude / squares.clamp_min(0).sqrt()
    return torch.where(squares > 0, gains, 1.0).float()


def scale_rows(y: Tensor, gains: Tensor, bias: Tensor | None) -> Tensor:
    """Semantics: bias[o] + gains[o] * (y[t, o] - bias[o]), computed in fp32, in y's dtype. gains [d_out] fp32."""
    if bias is None:
        return (y.float() * gains).to(y.dtype)
    shift = bias.float()
    return ((y.float() - shift).mul_(gains).add_(shift)).to(y.dtype)

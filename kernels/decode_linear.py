"""The linears of a decode step: a few rows through one matrix with what stands around it, in one launch.

A norm before a linear is not an op of its own: whoever makes the residual stream stores x * norm_weight and sums of squares of x, and the
linear multiplies its result by 1 / rms(x).
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .rank_pages import RankRows, rank_delta

Glu = Literal["", "silu", "gelu_tanh"]
MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class RowSquares:
    """Sums of squares of the rows of the residual stream, in parts that are added in their order."""

    parts: Tensor
    """[parts, rows] fp32"""
    width: int
    """numbers of a row"""
    eps: float


@dataclass(frozen=True, slots=True)
class Residual:
    """Where a product is added to the residual stream, and what is made ready for the linear that reads it next."""

    stream: Tensor
    """[rows, d_out], changed in place"""
    next_weight: Tensor
    """[d_out] of the norm before the next linear, in the dtype of the stream or fp32"""
    squares: RowSquares
    """of the new stream; written"""
    scale: float = 1.0
    """of what is added"""


def decode_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, norm: RowSquares | None = None, glu: Glu = "",
    residual: Residual | None = None, rank: RankRows | None = None,
) -> None:
    """Semantics: y = (x W^T + rank_delta(x)) / rms + bias;  with `glu` out = act(y[:, :n/2]) * y[:, n/2:];  with `residual`
    stream += scale * y, out = stream * next_weight, squares of the stream;  else out = y.

    x [rows, d_in], rows <= MAX_ROWS; weight [n, d_in]; bias [n]; out [rows, n], or [rows, n/2] with `glu`. All of one dtype, sums in
    fp32. 1 / rms = rsqrt(sum(norm.parts) / norm.width + eps), 1 without `norm`. A row does not depend on the other rows.
    """
    y = x.float() @ weight.float().T
    if rank is not None:
        y += rank_delta(x, rank)
    if norm is not None:
        y *= torch.rsqrt(norm.parts.sum(0)[: x.shape[0], None] / norm.width + norm.eps)
    if bias is not None:
        y += bias.float()
    if glu:
        gate, up = y.chunk(2, -1)
        y = (F.silu(gate) if glu == "silu" else F.gelu(gate, approximate="tanh")) * up
    if residual is None:
        out.copy_(y)
        return
    stream = residual.stream.float() + residual.scale * y
    residual.stream.copy_(stream)
    out.copy_(stream * residual.next_weight.float())
    residual.squares.parts.zero_()
    residual.squares.parts[0, : x.shape[0]] = stream.square().sum(1)

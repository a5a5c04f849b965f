"""Rank rows of adapters that follow a DoRA in the mix of a row: gains do not act on them, so they are not added inside its linear."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from itertools import pairwise

import torch
from torch import Tensor

from .decode_linear import RowSquares
from .rank_pages import MAX_PAGES, RankRows, rank_delta
from .triton_compat import runs_triton, tl, triton

BLOCK, DEPTH = 256, 1024
"""outputs of a program, and inputs of one step of it"""


def late_ranks(x: Tensor, rank: RankRows, norm: RowSquares | None, which: Tensor, out: Tensor) -> None:
    """Semantics, for rows with a profile: out = rank_delta(x) / rms, in fp32; 1 / rms as in `decode_linear`.

    x [rows, d_in]; which int32 [rows], not 0 for these rows; out fp32 [rows, d_out], contiguous.
    """
    if not runs_triton(x):
        late_ranks_reference(x, rank, norm, which, out)
        return
    rows, d_in = x.shape
    pool = rank.pool
    ends = (*pool.ends, pool.ends[-1], pool.ends[-1])[:3]
    tiles = sum(triton.cdiv(end - start, BLOCK) for start, end in pairwise((0, *ends)))
    a, b = pool.a[:, rank.layer], pool.b[:, rank.layer]
    parts = norm.parts.shape[0] if norm else 0
    _late_ranks[(rows, tiles)](
        x, norm and norm.parts, which, a, b, rank.pages, rank.weights, out, x.stride(0), norm.parts.stride(0) if norm else 0,
        rank.weights.stride(0), a.stride(0), b.stride(0), norm.width if norm else 1, norm.eps if norm else 0.0, D_IN=d_in, E0=ends[0],
        E1=ends[1], E2=ends[2], PARTS=parts, PARTS_BLOCK=triton.next_power_of_2(max(parts, 1)), BLOCK=BLOCK, DEPTH=DEPTH,
        MAX_PAGES=MAX_PAGES, num_warps=8)


def late_ranks_reference(x: Tensor, rank: RankRows, norm: RowSquares | None, which: Tensor, out: Tensor) -> None:
    y = rank_delta(x, rank)
    if norm is not None:
        y *= torch.rsqrt(norm.parts.sum(0)[: len(x), None] / norm.width + norm.eps)
    out.copy_(torch.where(which[:, None] > 0, y, out))


@triton.jit
def _late_ranks(
    x, parts, which, a, b, pages, weights, out, x_row, parts_row, weights_row, a_page, b_page, width, eps, D_IN: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, MAX_PAGES: tl.constexpr,
):
    """Slices end at E0, E1, E2; a program has outputs of one of them."""
    row, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(which + row) > 0:
        T0: tl.constexpr = (E0 + BLOCK - 1) // BLOCK
        T1: tl.constexpr = T0 + (E1 - E0 + BLOCK - 1) // BLOCK
        piece, start, end = 0, tile * BLOCK, E0
        if tile >= T1:
            piece, start, end = 2, E1 + (tile - T1) * BLOCK, E2
        elif tile >= T0:
            piece, start, end = 1, E0 + (tile - T0) * BLOCK, E1
        n = start + tl.arange(0, BLOCK)
        inside = n < end
        r = tl.arange(0, 16)
        y = tl.zeros((BLOCK,), tl.float32)
        for number in range(0, tl.load(pages)):
            page = tl.load(pages + 1 + number).to(tl.int64)
            weight = tl.load(weights + row * weights_row + tl.load(pages + 1 + MAX_PAGES + number))
            if weight != 0:
                sums = tl.zeros((16, DEPTH), tl.float32)
                for k in range(0, D_IN, DEPTH):
                    d = k + tl.arange(0, DEPTH)
                    there = d < D_IN
                    inputs = tl.load(x + row * x_row + d, mask=there, other=0.0).to(tl.float32)
                    at = a + page * a_page + (piece * 16 + r[:, None]) * D_IN + d[None, :]
                    sums += tl.load(at, mask=there[None, :], other=0.0).to(tl.float32) * inputs[None, :]
                h = weight * tl.sum(sums, 1)
                at = b + page * b_page + n[:, None] * 16 + r[None, :]
                y += tl.sum(tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32) * h[None, :], 1)
        if parts is not None:
            part = tl.arange(0, PARTS_BLOCK)
            squares = tl.sum(tl.load(parts + part * parts_row + row, mask=part < PARTS, other=0.0), 0)
            y *= tl.rsqrt(squares / width + eps)
        tl.store(out + row.to(tl.int64) * E2 + n, y, mask=inside)

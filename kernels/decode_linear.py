"""The linears of a decode step: a few rows through one matrix with what stands around it, in one launch.

A norm before a linear is not an op of its own: whoever makes the residual stream stores x * norm_weight and sums of squares of x, and the
linear multiplies its result by 1 / rms(x).
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_linear_triton import linear_kernel
from .early import early_launch
from .packed_linear import packed_linear, packed_rank_depth, packed_scratch
from .rank_pages import MAX_PAGES, RankRows, rank_delta
from .repacked import RepackedWeight
from .stamps import Stamp
from .tiles import linear_tile, row_tiles
from .triton_compat import INTERPRETED, runs_triton

Glu = Literal["", "silu", "gelu_tanh"]
MAX_ROWS = 64
LINES_AHEAD = 4
"""of 128 bytes of each row of the matrix that a program has brought to the L2 cache before x is there"""


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


@dataclass(frozen=True, slots=True)
class LinearWork:
    """Scratch of one linear with rank rows."""

    counters: Tensor
    """int32, zero when a step begins: what of the rank rows and the norm is done (rank_programs.py)"""
    h: Tensor
    """H [slices, rows, MAX_PAGES * 16]; every linear of a step writes it anew, as all that follows"""
    partials: Tensor
    added: Tensor
    """fp32 [rows, d_out]: H B^T"""
    inverses: Tensor
    """fp32 [rows]: 1 / rms"""
    sums: Tensor
    """int32, zero between launches: sums that programs of a packed matrix hand over (handover.py)"""


class DecodeWork:
    """Scratch of all linears of a step of up to `rows` rows; `linears` names their d_in, d_out and slices in the order of the step,
    `packed` its packed matrices in any order."""

    def __init__(
        self, rows: int, linears: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device,
        packed: Sequence[RepackedWeight] = (),
    ) -> None:
        row_tile, tiles = row_tiles(rows)
        places = tiles * MAX_PAGES * max(slices for _, _, slices in linears)
        self._counters = torch.zeros(len(linears), 4 + places, dtype=torch.int32, device=device)
        self._sums = torch.zeros(max((packed_scratch(weight, rows) for weight in packed), default=0), dtype=torch.int32, device=device)
        self._h = torch.empty(places * row_tile * 16, dtype=dtype, device=device)
        parts = max(slices * -(-d_in // min(packed_rank_depth(d_in), linear_tile(d_in, d_in, False, dtype.itemsize, rows).rank_depth))
                    for d_in, _, slices in linears)
        self._added = torch.empty(tiles * row_tile * max(d_out for _, d_out, _ in linears), dtype=torch.float32, device=device)
        self._inverses = torch.empty(tiles * row_tile, dtype=torch.float32, device=device)
        self._partials = torch.empty(tiles * MAX_PAGES * parts * row_tile * 16, dtype=torch.float32, device=device)

    def begin(self) -> None:
        """Once a step, before its first linear; part of its graph. A step that ended early leaves nothing behind."""
        self._counters.zero_()

    def lane(self, index: int) -> LinearWork:
        """Of the linear at `index` in the step."""
        return LinearWork(self._counters[index], self._h, self._partials, self._added, self._inverses, self._sums)


def decode_linear(
    x: Tensor, weight: Tensor | RepackedWeight, bias: Tensor | None, out: Tensor, *, norm: RowSquares | None = None, glu: Glu = "",
    residual: Residual | None = None, rank: RankRows | None = None, work: LinearWork | None = None,
    stamp: Stamp | None = None,
) -> None:
    """Semantics: y = (x W^T + rank_delta(x)) / rms + bias;  with `glu` out = act(y[:, :n/2]) * y[:, n/2:];  with `residual`
    stream += scale * y, out = stream * next_weight, squares of the stream;  else out = y.

    x [rows, d_in], rows <= MAX_ROWS; weight [n, d_in]; bias [n]; out [rows, n], or [rows, n/2] with `glu`. All of one dtype, sums in
    fp32. 1 / rms = rsqrt(sum(norm.parts) / norm.width + eps), 1 without `norm`. A row does not depend on the other rows.

    As a kernel: `work` with `rank` or `norm`; residual.squares has at least `square_parts(d_in, n, dtype)` parts. A row's bits do not
    depend on how many rows there are, nor on the pages that do not act on it; without active pages they are those without `rank`.
    x * norm_weight is not divided by rms before it is multiplied: fp16, which that may overflow, takes `residual_norm` and no `norm`.
    `stamp`: an int64 tensor and the place in it where the kernel stores the device's clock, in ns, when the launch before is done. What
    rank.pages holds may be read while that still runs: it must not be what writes them. A packed `weight` is
    gated where `glu` is, its `work` was made with it, and residual.squares has at least `packed_square_parts(weight)` parts.
    """
    if isinstance(weight, RepackedWeight):
        packed_linear(x, weight, bias, out, norm, glu, residual, rank, work, stamp)
    elif runs_triton(x):
        _launch(x, weight, bias, out, norm, glu, residual, rank, work, stamp)
    else:
        decode_linear_reference(x, weight, bias, out, norm=norm, glu=glu, residual=residual, rank=rank)


def square_parts(d_in: int, d_out: int, dtype: torch.dtype) -> int:
    """How many sums of squares a linear with `residual` writes for a row."""
    return -(-d_out // linear_tile(d_in, d_out, False, dtype.itemsize, 1).columns)


def decode_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, norm: RowSquares | None = None, glu: Glu = "",
    residual: Residual | None = None, rank: RankRows | None = None,
) -> None:
    """`decode_linear` in plain torch; all in float64 where x is."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to(wide).T
    if rank is not None:
        y += rank_delta(x, rank)
    if norm is not None:
        y *= torch.rsqrt(norm.parts.sum(0)[: x.shape[0], None] / norm.width + norm.eps)
    if bias is not None:
        y += bias.to(wide)
    if glu:
        gate, up = y.chunk(2, -1)
        y = (F.silu(gate) if glu == "silu" else F.gelu(gate, approximate="tanh")) * up
    if residual is None:
        out.copy_(y)
        return
    stream = residual.stream.to(wide) + residual.scale * y
    residual.stream.copy_(stream)
    out.copy_(stream * residual.next_weight.to(wide))
    residual.squares.parts.zero_()
    residual.squares.parts[0, : x.shape[0]] = stream.square().sum(1)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm: RowSquares | None, glu: Glu, residual: Residual | None,
    rank: RankRows | None, work: LinearWork | None, stamp: Stamp | None,
) -> None:
    rows, d_in = x.shape
    d_out = weight.shape[0]
    tile = linear_tile(d_in, d_out, bool(glu), x.element_size(), rows)
    row_tile, cuts = row_tiles(rows)
    pool, squares = rank.pool if rank else None, residual.squares if residual else None
    ends = (d_out // 2, d_out, d_out) if glu else (*(pool.ends if pool else ()), d_out, d_out, d_out)[:3]
    tiles = sum(-(-(end - start) // tile.columns) for start, end in pairwise((0, *ends[: 1 if glu else 3])))
    programs = 0 if rank is None else tile.rank_programs
    parts = norm or squares
    linear_kernel[(programs + (norm is not None) + tiles * cuts,)](
        x, weight, bias, out, norm and norm.parts, residual and residual.stream, residual and residual.next_weight,
        squares and squares.parts, pool and pool.a[:, rank.layer], pool and pool.b[:, rank.layer], rank and rank.pages,
        rank and rank.weights, work and work.h, work and work.partials, work and work.added, work and work.inverses,
        work and work.counters, stamp and stamp[0][stamp[1] :],
        rows, x.stride(0), out.stride(0), parts.parts.stride(0) if parts else 0, rank.weights.stride(0) if rank else 0,
        pool.a.stride(0) if pool else 0, pool.b.stride(0) if pool else 0, norm.width if norm else 1, norm.eps if norm else 0.0,
        residual.scale if residual else 1.0,
        D_IN=d_in, E0=ends[0], E1=ends[1], E2=ends[2], SLICES=pool.slices if pool else 1, GLU=glu,
        BM=row_tile, ROW_TILES=cuts, BN=tile.columns, BK=tile.depth, STAGES=tile.stages, TILES=tiles,
        PARTS=norm.parts.shape[0] if norm else 0, PARTS_OUT=squares.parts.shape[0] if squares else 0,
        DEPTH=tile.rank_depth, STEP=tile.rank_step, PROGRAMS=programs,
        LANES=tile.lanes, LEVELS=tile.columns.bit_length() - 1, EN=tile.rank_columns, CHUNK=tile.rank_chunk, MEET=tile.meet,
        MAX_PAGES=MAX_PAGES, ASSEMBLY=not INTERPRETED, AHEAD=LINES_AHEAD, num_warps=tile.warps, **early_launch(),
        enable_fp_fusion=False,  # which sums it fuses may differ between two kernels
    )

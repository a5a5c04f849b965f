"""`decode_linear` over a repacked matrix: how it is cut into programs, and their launch."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .early import early_launch
from .packed_decode import packed_kernel
from .rank_pages import MAX_PAGES, RankRows
from .repack import SUPER, TILE_ROWS
from .repacked import MOST_PARTS, RepackedWeight
from .stamps import Stamp
from .tiles import row_tiles
from .triton_compat import INTERPRETED
from .unpack_rows import KINDS

if TYPE_CHECKING:
    from .decode_linear import Glu, LinearWork, Residual, RowSquares

PROGRAMS = 512
"""that a matrix is cut into where it has inputs enough: about four for each multiprocessor of the GPUs that this is for"""
RANK_PROGRAMS = 1 if INTERPRETED else 128
"""half as many beside a large matrix: the multiprocessor with the most programs sets the time, and they fill what its programs leave"""
RANK_STEP = 64
"""inputs of one step of a rank task: it takes no more shared memory than the base product does"""
RANK_CHUNK = 64
"""rank rows of one step behind the product; all pages that may act are a multiple of it"""


@dataclass(frozen=True, slots=True)
class PackedTile:
    """What of it changes bits, `split`, follows from the shape of the matrix alone."""

    columns: int
    """rows of the matrix of a program"""
    rows: int
    """of the step"""
    split: int
    """programs that share the inputs"""
    stages: int
    """super-blocks that are read ahead"""
    warps: int
    """few, each with rows of its own: a step of many waits for the slowest"""


def packed_tile(weight: RepackedWeight, rows: int) -> PackedTile:
    """For a step of `rows` rows; where the matrix has few rows, programs split its inputs."""
    tiles, supers = sum(part.padded for part in weight.parts) // 64, -(-weight.shape[1] // SUPER)
    split = 1
    while split < 8 and tiles * split * 2 <= PROGRAMS and supers >= 6 * split:
        split *= 2
    if rows > 8:
        return PackedTile(32, 16, split, 3, 2)
    least = next(size for size in (2, 4, 8) if rows <= size) * (2 if INTERPRETED else 1)
    return PackedTile(64, least, split, 3, 2) if _large(weight) else PackedTile(32, least, split, 3, 1)


def _large(weight: RepackedWeight) -> bool:
    """Whether programs of 64 of its rows fill a GPU."""
    return 4 * sum(part.padded for part in weight.parts) // 64 >= 3 * PROGRAMS


def packed_rank_depth(d_in: int) -> int:
    """Inputs of a rank task."""
    return min(512, -(-d_in // RANK_STEP) * RANK_STEP)


def packed_square_parts(weight: RepackedWeight) -> int:
    """How many sums of squares a linear with `residual` writes for a row."""
    return sum(part.padded for part in weight.parts) // TILE_ROWS


def packed_scratch(weight: RepackedWeight, rows: int) -> int:
    """How many fp32 sums programs of a step of up to `rows` rows hand to each other."""
    most = 0
    for count in {min(rows, step) for step in (2, 4, 8, rows)}:
        tile = packed_tile(weight, count)
        if tile.split > 1:
            most = max(most, sum(part.padded for part in weight.parts) * tile.split * tile.rows * -(-count // tile.rows))
    return most


def packed_linear(
    x: Tensor, weight: RepackedWeight, bias: Tensor | None, out: Tensor, norm: RowSquares | None, glu: Glu, residual: Residual | None,
    rank: RankRows | None, work: LinearWork, stamp: Stamp | None,
) -> None:
    """`decode_linear`; x of 16 bits, `weight` gated where `glu` is."""
    rows, d_in = x.shape
    tile = packed_tile(weight, rows)
    h_rows, h_tiles = row_tiles(rows)
    tiles = sum(part.padded for part in weight.parts) // tile.columns
    cuts = -(-rows // tile.rows)
    squares = residual.squares if residual else None
    parts = norm or squares
    pool = rank.pool if rank else None
    ends = (*(pool.ends if pool else ()), *[weight.shape[0]] * 2)[:2]
    programs = 0 if rank is None else max(1, RANK_PROGRAMS // (2 if _large(weight) else 1))
    some = [*weight.parts, *[None] * (MOST_PARTS - len(weight.parts))]
    kinds = {}
    for index, part in enumerate(some):
        kinds |= {f"ROWS{index}": part.rows if part else 0, f"BITS{index}": part.order.bits if part else 0,
                  f"KIND{index}": KINDS[part.order.scales] if part else 0, f"MINIMA{index}": int(part.order.minima) if part else 0,
                  f"ZERO{index}": part.order.zero if part else 0}
    packed_kernel[(programs + tiles * cuts * tile.split,)](
        x, *(part and part.data for part in some), bias, out, norm and norm.parts, residual and residual.stream,
        residual and residual.next_weight, squares and squares.parts, work.sums,
        pool and pool.a[:, rank.layer], pool and pool.b[:, rank.layer], rank and rank.pages, rank and rank.weights, work.h, work.partials,
        work.counters, stamp and stamp[0][stamp[1] :],
        rows, x.stride(0), out.stride(0), parts.parts.stride(0) if parts else 0,
        rank.weights.stride(0) if rank else 0, pool.a.stride(0) if pool else 0, pool.b.stride(0) if pool else 0,
        norm.width if norm else 1, norm.eps if norm else 0.0, residual.scale if residual else 1.0,
        K=d_in, **kinds, E0=ends[0], E1=ends[1], SLICES=pool.slices if pool else 1, GLU=glu, BN=tile.columns, BT=tile.rows,
        G=max(1, min(4, (16 if INTERPRETED else 8) // tile.rows)),
        ROW_TILES=cuts, SPLIT=tile.split, STAGES=tile.stages, TILES=tiles, PARTS=norm.parts.shape[0] if norm else 0,
        LEVELS=(norm.parts.shape[0] - 1).bit_length() if norm else 0, PARTS_OUT=squares.parts.shape[0] if squares else 0,
        H_BM=h_rows, H_TILES=h_tiles, DEPTH=packed_rank_depth(d_in), STEP=RANK_STEP, PROGRAMS=programs, CHUNK=RANK_CHUNK,
        MAX_PAGES=MAX_PAGES, ASSEMBLY=not INTERPRETED, num_warps=tile.warps, **early_launch(),
        enable_fp_fusion=False,  # as in decode_linear
    )

"""How the product of a decode step is cut into programs: from the shape of the matrix alone, so that a row of a step has the same bits in
whatever company; only what does not change bits (how many rows a program takes, how far it reads ahead) follows from the rows."""
from __future__ import annotations

from dataclasses import dataclass

SHARED_BYTES = 100_000
"""of one program's read-ahead: two programs share a multiprocessor, so that rank rows are computed beside the base product"""


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Of one linear."""

    columns: int
    """outputs of a program (of the gate and of the up half each, with a gate)"""
    depth: int
    """inputs of one step of its loop"""
    stages: int
    """steps that are read ahead"""
    warps: int
    rank_depth: int
    """inputs of one rank task; a task's sums are added in the order of the inputs"""
    rank_step: int
    rank_programs: int
    """programs that do nothing but rank tasks"""
    rank_columns: int
    """outputs of a rank program's task"""
    rank_chunk: int
    """rank rows of one step of it"""
    meet: int
    """the step of the loop in which the base product takes what the rank programs made"""


def linear_tile(d_in: int, d_out: int, glu: bool, itemsize: int, rows: int) -> LinearTile:
    """`d_out` counts the rows of the matrix."""
    columns = next((size for size in (64, 32) if d_out >= 96 * size), 16)
    depth = min(_divisor(d_in), 128 if columns == 64 else 256) * 2 // itemsize
    stage = (columns + (16 if rows <= 16 else 32)) * depth * itemsize
    if glu and columns > 16:
        columns //= 2
    stages = max(3, min(8, SHARED_BYTES // stage + 1))
    return LinearTile(columns, depth, stages, 4, *_rank_tasks(d_in, itemsize), 66, 64, 64, max(0, -(-d_in // depth) - stages))


def row_tiles(rows: int) -> tuple[int, int]:
    """Rows of a program, and how many programs share them."""
    return (16, 1) if rows <= 16 else (32, -(-rows // 32))


def rank_tile_pages(rows: int) -> int:
    """Pages of one rank task."""
    return 1 if rows <= 16 else 2


def _rank_tasks(d_in: int, itemsize: int) -> tuple[int, int]:
    step = min(_divisor(d_in), 512 // itemsize)
    parts = -(-d_in // 4096)
    return -(-d_in // (parts * step)) * step, step


def _divisor(d_in: int) -> int:
    """The largest power of two from 64 to 256 that divides `d_in`, 64 where none does."""
    return next((size for size in (256, 128) if d_in % size == 0), 64)

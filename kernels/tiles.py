"""How the product of a decode step is cut into programs: from the shape of the matrix alone, so that a row of a step has the same bits in
whatever company; only what does not change bits (how many rows a program takes, how far it reads ahead) follows from the rows."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .triton_compat import INTERPRETED

SHARED_BYTES = 112_000
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
    lanes: int
    """parts of each step that warps take for themselves, where the outputs are too few to be shared among them"""
    warps: int
    rank_depth: int
    """inputs of one rank task; a task's sums are added in the order of the inputs"""
    rank_step: int
    rank_programs: int
    """programs that do nothing but rank tasks: one on each multiprocessor, or the others would crowd where these are not"""
    rank_columns: int
    """outputs of a rank program's task"""
    rank_chunk: int
    """rank rows of one step of it"""
    meet: int
    """the step of the loop in which the base product takes what the rank programs made"""


def linear_tile(d_in: int, d_out: int, glu: bool, itemsize: int, rows: int) -> LinearTile:
    """`d_out` counts the rows of the matrix."""
    columns = next((size for size in (128, 64, 32) if d_out >= 96 * size), 16)
    lanes = 4 if columns <= 32 and d_in % 256 == 0 and itemsize == 2 else 1
    depth = 256 if lanes > 1 else min(_divisor(d_in), 128) * 2 // itemsize
    stage = (columns + (16 if rows <= 16 else 32)) * depth * itemsize
    stages = max(3, min(8, SHARED_BYTES // stage + 1))
    outputs, chunk = (64, 64) if itemsize > 2 else (128, 64) if columns == 128 else (64, 128)
    return LinearTile(columns // 2 if glu and columns > 16 else columns, depth, stages, lanes, 4, *_rank_tasks(d_in, itemsize),
                      _multiprocessors(), outputs, chunk, max(0, -(-d_in // depth) - stages))


def row_tiles(rows: int) -> tuple[int, int]:
    """Rows of a program, and how many programs share them."""
    return (16, 1) if rows <= 16 else (32, -(-rows // 32))


def _rank_tasks(d_in: int, itemsize: int) -> tuple[int, int]:
    step = min(_divisor(d_in), 512 // itemsize)
    parts = -(-d_in // 1024)
    return -(-d_in // (parts * step)) * step, step


def _divisor(d_in: int) -> int:
    """The largest power of two from 64 to 256 that divides `d_in`, 64 where none does."""
    return next((size for size in (256, 128) if d_in % size == 0), 64)


@cache
def _multiprocessors() -> int:
    if INTERPRETED or not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

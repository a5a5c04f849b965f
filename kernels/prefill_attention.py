"""Attention of any step of a GPU: prompts' chunks behind what is stored of them, and single tokens, of many requests in one launch.

The rows of a request are cut into tiles, one product each for all query heads that share keys. Where a request has so few rows that its
tiles leave the GPU idle, each tile's tokens are parted into stretches too, and the program that ends last joins them in their order. How,
follows from the request's own rows and tokens: what runs beside it changes no bit, nor does where its blocks lie.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .decode_attention import head_width, kernels_take, power_of_two
from .launch import launch
from .prefill_attention_triton import prefill_attention_kernel
from .spans import Scores, Span
from .triton_compat import runs_triton
from .uploads import uploaded

FILLED = 264
"""programs that a request is parted into, where it has tokens enough: two run on a multiprocessor"""
LEAST_TOKENS = 256
"""of a stretch"""
MANY = 528
"""programs from which on tiles have twice the rows: each read of a key then serves more of them"""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a program works."""

    queries: int
    """rows of its products, one for each head of a row that shares keys; no row's sums depend on it"""
    tile: int
    """keys taken at once"""
    warps: int
    stages: int
    """of the reads under way"""
    registers: int | None = None
    """of a thread at most, so that two programs share a multiprocessor: one multiplies while the other takes exponents"""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What the rows of a step look at in layers of one window: on the device, made once a step."""

    pieces: Tensor
    """[pieces, 10] int32, what each program does for a head of the cache, those that take longest first: some rows of a request (first row
    in the step, rows, position of the first, the request's row of the tables) against some of its tokens (first, end), which are one
    stretch of all that the rows see (which, of how many) and are put into the scratch (product rows before the tile's, the tile's counter)
    """
    tables: Tensor
    """[requests, blocks] int32"""
    window: int
    shape: Shape
    parts: Tensor
    """[product rows of all stretches, kv_heads, width] fp32: what the stretches of tiles add up to"""
    sums: Tensor
    """[product rows, kv_heads, 2] fp32: their largest scores and sums of weights"""
    arrived: Tensor
    """[tiles that are parted, kv_heads] int32, zero between launches"""


def takes_pieces(caches: Tensor) -> bool:
    """Whether `prefill_attention` can be used with caches [layers, 2, kv_heads, blocks, block_tokens, d] like these."""
    return runs_triton(caches) and kernels_take(caches[0])


def cut_pieces(spans: Sequence[Span], caches: Tensor, heads: int, window: int = 0) -> Pieces:
    """The pieces of `spans` for `heads` query heads, in layers whose rows see the last `window` tokens only (0: all)."""
    kv_heads, size = caches.shape[2], caches.shape[5]
    group = heads // kv_heads
    shape, wide = _shapes(size, group, caches.dtype)
    taken, length = np.array([(span.rows, span.length) for span in spans]).T
    programs = -(-taken // (shape.queries // group)) * kv_heads
    origins = np.maximum(0, length - taken + 1 - window) // shape.tile * shape.tile if window else np.zeros_like(length)
    stretches = np.maximum(LEAST_TOKENS, -(-(length - origins) // np.maximum(1, FILLED // programs)))
    stretches = -(-stretches // shape.tile) * shape.tile
    if programs.sum() >= MANY:
        shape = wide
    row, rows, position, table, first, end = _tiles(spans, shape.queries // group, shape.tile, window)
    origin, stretch = origins[table], stretches[table]
    before = (first - origin) // stretch
    splits = (end - 1 - origin) // stretch - before + 1
    parted = splits > 1
    scratch_rows = np.where(parted, splits * rows * group, 0)
    number, split = _counted(splits)
    border = origin[number] + (before[number] + split) * stretch[number]
    pieces = np.stack((row[number], rows[number], position[number], table[number], np.maximum(border, first[number]),
                       np.minimum(border + stretch[number], end[number]), split, splits[number],
                       (np.cumsum(scratch_rows) - scratch_rows)[number], (np.cumsum(parted) - parted)[number]), 1)
    pieces = pieces[np.argsort(pieces[:, 4] - pieces[:, 5], kind="stable")]
    tables = _tables(spans)
    on_device = uploaded(np.concatenate((tables.ravel(), pieces.ravel())).astype(np.int32), caches.device)
    scratch = {"dtype": torch.float32, "device": caches.device}
    return Pieces(
        on_device[tables.size :].view(-1, 10), on_device[: tables.size].view(tables.shape), window, shape,
        torch.empty(int(scratch_rows.sum()), kv_heads, head_width(size), **scratch),
        torch.empty(int(scratch_rows.sum()), kv_heads, 2, **scratch),
        torch.zeros(int(parted.sum()), kv_heads, dtype=torch.int32, device=caches.device))


def _tiles(spans: Sequence[Span], most_rows: int, tile: int, window: int) -> np.ndarray:
    """[6, tiles] row, rows, position, table, first and end of what they see."""
    start, rows, length = np.array([(span.start, span.rows, span.length) for span in spans]).T
    table, index = _counted(-(-rows // most_rows))
    offset = index * most_rows
    position, taken = (length - rows)[table] + offset, np.minimum(most_rows, rows[table] - offset)
    first = np.maximum(0, position + 1 - window) // tile * tile if window else np.zeros_like(position)
    return np.stack((start[table] + offset, taken, position, table, first, position + taken))


def _tables(spans: Sequence[Span]) -> np.ndarray:
    """A multiple of four wide, so that what lies behind them begins at a multiple of 16 bytes: kernels are compiled for that."""
    first, count = np.array([run for span in spans for run in span.runs]).T
    blocks = np.array([sum(count for _, count in span.runs) for span in spans])
    tables = np.zeros((len(spans), -(-blocks.max() // 4) * 4), np.int64)
    run, place = _counted(count)
    tables[_counted(blocks)] = first[run] + place
    return tables


def _counted(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[sum] each index as often as its count says, and which of them it is."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - (np.cumsum(counts) - counts)[of]


def prefill_attention(q: Tensor, cache: Tensor, pieces: Pieces, scores: Scores) -> Tensor:
    """As `paged_attention`, by one kernel: softmax(cap(q k^T scale) + mask) v of every span by itself.

    q [tokens, heads, d], a view of rows that are further apart is fine; cache: a layer's [2, kv_heads, blocks, block_tokens, d], this
    step's tokens already written. Returns [tokens, heads * d]. Products and softmax in fp32, weights rounded to the cache's dtype.
    """
    tokens, heads, size = q.shape
    _, kv_heads, blocks, block, _ = cache.shape
    shape = pieces.shape
    out = q.new_empty(tokens, heads * size)
    scale = size**-0.5 if scores.scale is None else scores.scale
    launch(
        prefill_attention_kernel, (q.get_device(), q.dtype, q.data_ptr() % 16, q.stride(0)), (kv_heads, pieces.pieces.shape[0], 1),
        (q, cache, out, pieces.pieces, pieces.tables, pieces.parts, pieces.sums, pieces.arrived, blocks, pieces.tables.shape[1],
         q.stride(0), pieces.window, scale, scores.softcap),
        {"HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size, "WIDTH": head_width(size), "BLOCK": block, "SOFTCAP": scores.softcap != 0,
         "WINDOWED": pieces.window != 0, "QUERIES": shape.queries, "TILE": shape.tile, "STAGES": shape.stages},
        num_warps=shape.warps, maxnreg=shape.registers)
    return out


def _shapes(size: int, group: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
    """For few programs, and for MANY."""
    if dtype == torch.float32:
        few = many = Shape(64, 32, 8, 1) if size <= 64 else Shape(32, 32, 8, 1) if size <= 128 else Shape(32, 16, 8, 1)
    elif size <= 128:
        few, many = Shape(64, 64, 4, 3), Shape(128, 64, 8, 3, registers=128)
    else:
        few = many = Shape(64, 64, 8, 3)
    least = power_of_two(group)
    return replace(few, queries=max(few.queries, least)), replace(many, queries=max(many.queries, least))

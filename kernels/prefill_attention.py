"""Attention of any step of a GPU: prompts' chunks behind what is stored of them, and single tokens, of many requests in one launch.

The rows of a request are cut into tiles, one product each for all query heads that share keys. Where a request has so few rows that its
tiles leave the GPU idle, each tile's tokens are parted into stretches too, and the program that ends last joins them in their order. How,
follows from the request's own rows and tokens: what runs beside it changes no bit, nor does where its blocks lie.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .decode_attention import head_width, kernels_take, power_of_two
from .prefill_attention_triton import prefill_attention_kernel
from .spans import Scores, Span
from .triton_compat import runs_triton

FILLED = 132
"""programs that a request is parted into at least, where it has tokens enough"""
LEAST_TOKENS = 256
"""of a stretch"""


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
    queries, tile, *_ = _shape(size, group, caches.dtype)
    tiles, stretch = _tiles(spans, queries // group, tile, kv_heads, window)
    row, rows, position, table, first, end = tiles
    splits = -(-(end - first) // stretch)
    parted = splits > 1
    scratch_rows = np.where(parted, splits * rows * group, 0)
    number, split = _counted(splits)
    begins = first[number] + split * stretch[number]
    pieces = np.stack((row[number], rows[number], position[number], table[number], begins,
                       np.minimum(begins + stretch[number], end[number]), split, splits[number],
                       (np.cumsum(scratch_rows) - scratch_rows)[number], (np.cumsum(parted) - parted)[number]), 1)
    pieces = pieces[np.argsort(pieces[:, 4] - pieces[:, 5], kind="stable")]
    tables = _tables(spans)
    on_device = _uploaded(np.concatenate((tables.ravel(), pieces.ravel())), caches.device)
    scratch = {"dtype": torch.float32, "device": caches.device}
    return Pieces(
        on_device[tables.size :].view(-1, 10), on_device[: tables.size].view(tables.shape), window,
        torch.empty(int(scratch_rows.sum()), kv_heads, head_width(size), **scratch),
        torch.empty(int(scratch_rows.sum()), kv_heads, 2, **scratch),
        torch.zeros(int(parted.sum()), kv_heads, dtype=torch.int32, device=caches.device))


def _tiles(spans: Sequence[Span], most_rows: int, tile: int, kv_heads: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """[6, tiles] row, rows, position, table, first and end of what they see; [tiles] tokens of a stretch."""
    start, rows, length = np.array([(span.start, span.rows, span.length) for span in spans]).T
    tiles = -(-rows // most_rows)
    seen = length - np.maximum(0, length - rows + 1 - window) if window else length
    stretch = np.maximum(LEAST_TOKENS, -(-seen // np.maximum(1, FILLED // (tiles * kv_heads))))
    stretch = -(-stretch // tile) * tile
    table, index = _counted(tiles)
    offset = index * most_rows
    position, taken = (length - rows)[table] + offset, np.minimum(most_rows, rows[table] - offset)
    first = np.maximum(0, position + 1 - window) // tile * tile if window else np.zeros_like(position)
    return np.stack((start[table] + offset, taken, position, table, first, position + taken)), stretch[table]


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


def _uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """[numbers] int32 on the device; the host does not wait for the copy."""
    host = torch.from_numpy(numbers.astype(np.int32))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def prefill_attention(q: Tensor, cache: Tensor, pieces: Pieces, scores: Scores) -> Tensor:
    """As `paged_attention`, by one kernel: softmax(cap(q k^T scale) + mask) v of every span by itself.

    q [tokens, heads, d], a view of rows that are further apart is fine; cache: a layer's [2, kv_heads, blocks, block_tokens, d], this
    step's tokens already written. Returns [tokens, heads * d]. Products and softmax in fp32, weights rounded to the cache's dtype.
    """
    tokens, heads, size = q.shape
    _, kv_heads, blocks, block, _ = cache.shape
    queries, tile, warps, stages, registers = _shape(size, heads // kv_heads, cache.dtype)
    out = q.new_empty(tokens, heads * size)
    scale = size**-0.5 if scores.scale is None else scores.scale
    prefill_attention_kernel[(kv_heads, len(pieces.pieces))](
        q, cache, out, pieces.pieces, pieces.tables, pieces.parts, pieces.sums, pieces.arrived, blocks, pieces.tables.shape[1],
        q.stride(0), pieces.window, scale, scores.softcap, HEADS=heads, KV_HEADS=kv_heads, SIZE=size, WIDTH=head_width(size), BLOCK=block,
        SOFTCAP=scores.softcap != 0, WINDOWED=pieces.window != 0, QUERIES=queries, TILE=tile, STAGES=stages, num_warps=warps,
        maxnreg=registers)
    return out


def _shape(size: int, group: int, dtype: torch.dtype) -> tuple[int, int, int, int, int | None]:
    """Rows of a product (a row's heads that share keys each), keys taken at once, warps, reads under way, registers of a thread.

    Two programs share a multiprocessor, so that one multiplies while the other takes exponents.
    """
    if dtype == torch.float32:
        queries, tile, warps, stages, registers = (64, 32, 8, 1, None) if size <= 64 else (32, 32, 8, 1, None) if size <= 128 else (
            32, 16, 8, 1, None)
    elif size <= 64:
        queries, tile, warps, stages, registers = 64, 128, 4, 3, None
    elif size <= 128:
        queries, tile, warps, stages, registers = 128, 64, 8, 3, 128
    else:
        queries, tile, warps, stages, registers = 64, 32, 8, 3, None
    return max(queries, power_of_two(group)), tile, warps, stages, registers

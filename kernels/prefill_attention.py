"""Attention of any step of a GPU: prompts' chunks behind what is stored of them, and single tokens, of many requests in one launch.

The rows of a request are cut into tiles, one product each for all query heads that share keys. Where a request has so few rows that its
tiles leave the GPU idle, each tile's tokens are parted into stretches too, and the program that ends last joins them in their order. How,
follows from the request's own rows and tokens: what runs beside it changes no bit, nor does where its blocks lie.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from .decode_attention import WIDEST, head_width, power_of_two
from .prefill_attention_triton import prefill_attention_kernel
from .spans import Scores, Span
from .triton_compat import runs_triton

FILLED = 132
"""programs that a request is parted into at least, where it has tokens enough"""
LEAST_TOKENS = 256
"""of a stretch"""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a program does for a head of the cache: some rows of a request against some of its tokens."""

    row: int
    """its first row in the step"""
    rows: int
    position: int
    """of its first row"""
    table: int
    """the request's row of the block tables"""
    first: int
    """the first token looked at, a multiple of the tokens taken at once"""
    end: int
    """behind the last one"""
    split: int
    """which stretch of the tile's tokens this is, and of how many"""
    splits: int
    part: int
    """products' rows that lie before those of its tile in the scratch"""
    counter: int
    """the tile's place among those parted"""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What the rows of a step look at in layers of one window: on the device, made once a step."""

    pieces: Tensor
    """[pieces, 10] int32: the fields of each Piece, those that take longest first"""
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
    return runs_triton(caches) and caches.shape[5] <= WIDEST


def cut_pieces(spans: Sequence[Span], caches: Tensor, heads: int, window: int = 0) -> Pieces:
    """The pieces of `spans` for `heads` query heads, in layers whose rows see the last `window` tokens only (0: all)."""
    _, _, kv_heads, _, block, size = caches.shape
    group = heads // kv_heads
    queries, tile, _, _ = _shape(size, group, caches.dtype)
    pieces, parted, part = [], 0, 0
    for number, span in enumerate(spans):
        for cut in _cut(span, number, queries // group, tile, kv_heads, window):
            if cut[0].splits > 1:
                cut = [_placed(piece, part, parted) for piece in cut]
                part += len(cut) * cut[0].rows * group
                parted += 1
            pieces += cut
    pieces.sort(key=lambda piece: piece.first - piece.end)
    tables = _tables(spans, block)
    packed = np.concatenate((tables.ravel(), np.array([astuple(piece) for piece in pieces], np.int32).ravel()))
    on_device = _uploaded(packed, caches.device)
    scratch = {"dtype": torch.float32, "device": caches.device}
    return Pieces(
        on_device[tables.size :].view(-1, 10), on_device[: tables.size].view(tables.shape), window,
        torch.empty(part, kv_heads, head_width(size), **scratch), torch.empty(part, kv_heads, 2, **scratch),
        torch.zeros(parted, kv_heads, dtype=torch.int32, device=caches.device))


def _cut(span: Span, number: int, most_rows: int, tile: int, kv_heads: int, window: int) -> list[list[Piece]]:
    """The tiles of a span, each as its stretches."""
    start = span.length - span.rows
    tiles = -(-span.rows // most_rows)
    seen = span.length - (max(0, start + 1 - window) if window else 0)
    stretch = max(LEAST_TOKENS, -(-seen // max(1, FILLED // (tiles * kv_heads))))
    stretch = -(-stretch // tile) * tile
    cuts = []
    for offset in range(0, span.rows, most_rows):
        position, rows = start + offset, min(most_rows, span.rows - offset)
        first = max(0, position + 1 - window) // tile * tile if window else 0
        begins = range(first, position + rows, stretch)
        cuts.append([Piece(span.start + offset, rows, position, number, begin, min(begin + stretch, position + rows), split, len(begins),
                           0, 0) for split, begin in enumerate(begins)])
    return cuts


def _placed(piece: Piece, part: int, counter: int) -> Piece:
    return Piece(*astuple(piece)[:-2], part, counter)


def _uploaded(packed: np.ndarray, device: torch.device) -> Tensor:
    """`packed` on the device, behind what it does now; nothing waits for that."""
    host = torch.from_numpy(packed)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _tables(spans: Sequence[Span], block: int) -> np.ndarray:
    """A multiple of four wide, so that what lies behind them begins at a multiple of 16 bytes: kernels are compiled for that."""
    blocks = max(-(-span.length // block) for span in spans)
    tables = np.zeros((len(spans), -(-blocks // 4) * 4), np.int32)
    for row, span in zip(tables, spans, strict=True):
        place = 0
        for first, count in span.runs:
            row[place : place + count] = np.arange(first, first + count)[: len(row) - place]
            place += count
    return tables


def prefill_attention(q: Tensor, cache: Tensor, pieces: Pieces, scores: Scores) -> Tensor:
    """As `paged_attention`, by one kernel: softmax(cap(q k^T scale) + mask) v of every span by itself.

    q [tokens, heads, d], a view of rows that are further apart is fine; cache: a layer's [2, kv_heads, blocks, block_tokens, d], this
    step's tokens already written. Returns [tokens, heads * d]. Products and softmax in fp32, weights rounded to the cache's dtype.
    """
    tokens, heads, size = q.shape
    _, kv_heads, blocks, block, _ = cache.shape
    queries, tile, warps, stages = _shape(size, heads // kv_heads, cache.dtype)
    out = q.new_empty(tokens, heads * size)
    scale = size**-0.5 if scores.scale is None else scores.scale
    prefill_attention_kernel[(kv_heads, len(pieces.pieces))](
        q, cache, out, pieces.pieces, pieces.tables, pieces.parts, pieces.sums, pieces.arrived, blocks, pieces.tables.shape[1],
        q.stride(0), pieces.window, scale, scores.softcap, HEADS=heads, KV_HEADS=kv_heads, SIZE=size, WIDTH=head_width(size), BLOCK=block,
        SOFTCAP=scores.softcap != 0, WINDOWED=pieces.window != 0, QUERIES=queries, TILE=tile, STAGES=stages, num_warps=warps)
    return out


def _shape(size: int, group: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows of a product (a row's heads that share keys each), keys taken at once, warps, reads under way."""
    if dtype == torch.float32:
        queries, tile, warps, stages = (64, 32, 8, 1) if size <= 64 else (32, 32, 8, 1) if size <= 128 else (32, 16, 8, 1)
    else:
        queries, tile, warps, stages = (128, 64, 4, 3) if size <= 64 else (128, 64, 8, 3) if size <= 128 else (64, 32, 8, 3)
    return max(queries, power_of_two(group)), tile, warps, stages

"""The low-rank part of linears over pages of rank rows, for steps of any number of rows: prompts, and more requests than a graph takes.

The rows of a step are cut into tiles. Which pages act on a tile is found on the host from the weights, once a step: rows without adapters,
requests of different adapters, several on one row, and an aLoRA that begins within a prompt cost what acts on their tiles and no more.
The shrink reads the same input as the base's product, so that both can run side by side.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .launch import launch
from .lora_tiles_triton import expand_kernel, shrink_kernel
from .rank_pages import PAGE_ROWS, RankPool
from .triton_compat import runs_triton
from .uploads import uploaded

TILE_ROWS = 64
PLAIN_ROWS = 32
"""that a program takes of what comes behind a linear where no rank rows are added to it on the way"""
UNITS = 2
"""pages by slices that a program shrinks to at once"""
DEPTH_BYTES = 256
"""of the inputs of a row that a step of its loop takes"""
COLUMNS = 64
"""outputs that a program expands to"""
MOST_SLICES = 3
"""of a fused linear: q, k and v"""
PROGRAMS = 264
"""of a shrink: the inputs are parted until there are so many, or a part is short"""
LEAST_DEPTH = 256
SIDE_ROWS = 1024
"""of a step whose shrinks run beside the base's products; the device is done with fewer rows before it is told all of that"""


@dataclass(frozen=True, slots=True)
class TileList:
    """Which pages of linears of one kind act on each tile: those of one list of pages, in its order."""

    counts: Tensor
    """[tiles] int32: how many of a row of `pages` and `columns` hold"""
    pages: Tensor
    """[tiles, most] int32"""
    columns: Tensor
    """[tiles, most] int32: the adapter of each, as a column of the weights"""
    most: int
    whole: tuple[tuple[int, int], ...]
    """(page, column) of the list that was cut"""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """What acts on which rows of a step; on the device, made once a step."""

    weights: Tensor
    """[rows, adapters] fp32"""
    touched: Tensor
    """[rows] int32, 0 for rows on which nothing acts"""
    lists: tuple[TileList, ...]
    count: int
    partials: Tensor
    """fp32, sums of a shrink over parts of its inputs"""
    arrivals: Tensor
    """int32, zero between launches"""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """H of a linear, and what is to be made of it: what the rank rows add to the linear is H B^T."""

    h: Tensor
    """[rows, units * 16]: units page by page of a row's tile, in each slice by slice. In plain torch those of all pages of the list,
    whatever the tile"""
    pool: RankPool
    layer: int
    tiles: RowTiles
    number: int
    """of the tiles' list"""
    done: torch.cuda.Event | None = None

    @property
    def places(self) -> TileList:
        return self.tiles.lists[self.number]

    @property
    def of_kernels(self) -> tuple[Any, ...]:
        """What kernels that make H B^T ask for: B, counts, pages, touched, H; layer, strides of B and H, most pages of a tile."""
        one, b, h = self.places, self.pool.b, self.h
        return b, one.counts, one.pages, self.tiles.touched, h, self.layer, b.stride(0), b.stride(1), h.shape[1], one.most

    def wait(self) -> None:
        """What is launched behind this finds H."""
        if self.done is not None:
            torch.cuda.current_stream(self.h.device).wait_event(self.done)


class SideStream:
    """A stream beside the one in use, for shrinks that run while the base's product does."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.forked, self.joined = torch.cuda.Event(), torch.cuda.Event()


def cut_tiles(weights: np.ndarray, lists: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], device: torch.device) -> RowTiles:
    """The tiles of a step. weights [rows, adapters] fp32, 0 where an adapter does not act; lists: (pages, the column of each)."""
    rows, adapters = weights.shape
    starts = np.arange(0, rows, TILE_ROWS)
    acting = weights != 0
    by_tile = np.logical_or.reduceat(acting, starts, 0)
    parts = [np.ascontiguousarray(weights).view(np.int32).ravel(), acting.any(1).astype(np.int32)]
    orders: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for pages, columns in lists:
        if columns not in orders:  # linears of several kinds have the same
            acts = by_tile[:, list(columns)]
            counts = acts.sum(1)
            order = np.argsort(~acts, 1, kind="stable")[:, : counts.max(initial=0)]
            orders[columns] = counts, order, np.array(columns, np.int32)[order].ravel()
        counts, order, by_place = orders[columns]
        parts += [counts, np.array(pages, np.int32)[order].ravel(), by_place]
    ends = np.cumsum([len(part) for part in parts])
    numbers = uploaded(np.concatenate([part.astype(np.int32, copy=False) for part in parts]), device)
    pieces = [numbers[end - len(part) : end] for part, end in zip(parts, ends.tolist(), strict=True)]
    tiles = len(starts)
    cut = tuple(TileList(pieces[at], pieces[at + 1].view(tiles, -1), pieces[at + 2].view(tiles, -1), len(pieces[at + 1]) // tiles,
                         tuple(zip(*one, strict=True))) for at, one in zip(range(2, len(pieces), 3), lists, strict=True))
    tasks = tiles * max([1, *(_groups(one, MOST_SLICES) for one in cut)])
    return RowTiles(pieces[0].view(torch.float32).view(rows, adapters), pieces[1], cut, tiles,
                    torch.empty((PROGRAMS + tasks) * TILE_ROWS * UNITS * PAGE_ROWS, dtype=torch.float32, device=device),
                    torch.zeros(tasks, dtype=torch.int32, device=device))


def _groups(one: TileList, slices: int) -> int:
    """Programs that shrink a tile of `one`, side by side."""
    return -(-one.most * slices // UNITS)


def lora_shrink_tiles(x: Tensor, pool: RankPool, layer: int, tiles: RowTiles, number: int, side: SideStream | None = None) -> Shrunk:
    """Semantics: h[t, i, s, r] = w[t, column(i)] * sum_d x[t, d] a[page(i), s, r, d], i over the pages that act on the tile of row t.

    x [rows, d_in] in the dtype of `pool`; `number`: of the tiles' list for this linear. Weighed in fp32, stored in x's dtype. With `side`
    it is computed there, and nothing that comes behind on this stream waits for it until `lora_expand_tiles_`.
    """
    one = tiles.lists[number]
    if not runs_triton(x):
        return Shrunk(_shrink_reference(x, pool, layer, tiles, one), pool, layer, tiles, number)
    h = x.new_empty(x.shape[0], one.most * pool.slices * PAGE_ROWS)
    if not one.most:
        return Shrunk(h, pool, layer, tiles, number)
    groups, d_in = _groups(one, pool.slices), x.shape[1]
    splits = max(1, min(-(-PROGRAMS // (tiles.count * groups)), d_in // LEAST_DEPTH))
    step = DEPTH_BYTES // x.element_size()
    depth = -(-d_in // (splits * step)) * step
    beside = side is not None and x.shape[0] >= SIDE_ROWS
    if beside:
        side.forked.record()
        side.stream.wait_event(side.forked)
    launch(
        shrink_kernel, (x.get_device(), x.dtype, x.data_ptr() % 16, x.stride(0), d_in), (tiles.count * groups * splits, 1, 1),
        (x, pool.a, one.counts, one.pages, one.columns, tiles.weights, h, tiles.partials, tiles.arrivals, x.shape[0], layer, x.stride(0),
         pool.a.stride(0), pool.a.stride(1), tiles.weights.stride(0), h.shape[1], d_in, depth, one.most, groups, splits, pool.slices),
        {"BM": TILE_ROWS, "UNITS": UNITS, "BK": step, "STAGES": 3}, side.stream if beside else None, num_warps=4)
    if beside:
        side.joined.record(side.stream)
    return Shrunk(h, pool, layer, tiles, number, side.joined if beside else None)


def lora_expand_tiles_(y: Tensor, shrunk: Shrunk) -> None:
    """Semantics: y[t, o] += sum over pages i that act on the tile of row t, and their rows r, of h[t, i, s(o), r] b[page(i), o, r].

    y [rows, at least d_out] in the dtype of the pool, changed in place; rows on which nothing acts keep their bits. s(o): the slice of
    output o. Sums in fp32.
    """
    shrunk.wait()
    if not runs_triton(y):
        _expand_reference(y, shrunk)
        return
    if not shrunk.places.most:
        return
    ends, until = shrunk.pool.ends, _programs_until(shrunk.pool.ends)
    launch(
        expand_kernel, (y.get_device(), y.dtype, y.data_ptr() % 16, y.stride(0), ends), (until[-1], shrunk.tiles.count, 1),
        (y, *shrunk.of_kernels, y.shape[0], y.stride(0), shrunk.pool.slices, ends[0], ends[min(1, len(ends) - 1)], ends[-1],
         until[0], until[min(1, len(until) - 1)]), {"BM": TILE_ROWS, "BN": COLUMNS}, num_warps=4)


@lru_cache
def _programs_until(ends: tuple[int, ...]) -> tuple[int, ...]:
    """How many make the outputs of a tile up to the end of each slice."""
    return tuple(accumulate(-(-(end - start) // COLUMNS) for start, end in zip((0, *ends), ends, strict=False)))


def _shrink_reference(x: Tensor, pool: RankPool, layer: int, tiles: RowTiles, one: TileList) -> Tensor:
    h = [x.float() @ pool.a[page, layer].flatten(0, 1).float().T * tiles.weights[:, column, None] for page, column in one.whole]
    return torch.stack(h, 1).to(x.dtype)


def _expand_reference(y: Tensor, shrunk: Shrunk) -> None:
    by_slice, start = shrunk.h.float().unflatten(2, (shrunk.pool.slices, PAGE_ROWS)), 0
    for index, end in enumerate(shrunk.pool.ends):
        b = torch.cat([shrunk.pool.b[page, shrunk.layer, start:end].float() for page, _ in shrunk.places.whole], 1)
        y[:, start:end] = y[:, start:end].float() + by_slice[:, :, index].flatten(1) @ b.T
        start = end

"""Products of packed rows over all threads, and their numbers written out."""
from __future__ import annotations

import os
from functools import cache

import numpy as np
import torch

from .block_product import BLOCK, CodeKind, block_product, call_product
from .compiled import called, compiled, inner, summing
from .team import Team, meet, portion, take
from .vectors import code_at, half_at, pointer, signed_at

MOST_ROWS = 32
"""of x that are multiplied with packed numbers: above, it is faster to unpack these first"""
TOGETHER = 4
"""rows of x that a product takes at once"""
ALONE = 1 << 19
"""products of two numbers up to which one thread is done before another one is awake"""

FOUR, EIGHT, SIXTEENS, OFFSET = range(4)
"""of KINDS: four bits; eight; eight with a scale for every 16; eight with offsets"""
KINDS = (CodeKind(4, 32, True), CodeKind(8, 32, False), CodeKind(8, 16, False), CodeKind(8, 32, True))
_block_product = block_product(KINDS)
_FOUR_BYTES, _EIGHT_BYTES, _SIXTEENS_BYTES, _OFFSET_BYTES = (kind.group_bytes for kind in KINDS)


@cache
def team() -> Team:
    """As many threads as torch has when it is first asked for."""
    return Team(torch.get_num_threads())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=team.cache_clear)  # a child has none of its parent's threads


@called
def _product(kind, rows, data, groups, x, x_stride, sums, sums_stride, y):
    """`block_product` of KINDS."""
    _block_product(kind, rows, data, groups, x, x_stride, sums, sums_stride, y)


PRODUCT = _product.address
"""Called by this it is compiled once, not in each function that calls it"""


@inner
def _bytes_of(kind):
    """Of a kind's number: CodeKind.group_bytes"""
    return (_FOUR_BYTES, _EIGHT_BYTES, _SIXTEENS_BYTES, _OFFSET_BYTES)[kind]


@summing
def group_sums(x, sums):
    """Semantics: sums[t, g] = sum of x[t, 32 g : 32 g + 32].  x fp32 [T, d], sums fp32 [T, d / 32 or more]"""
    for row in range(x.shape[0]):
        for group in range(x.shape[1] // 32):
            total = np.float32(0)
            for place in range(32):
                total += x[row, 32 * group + place]
            sums[row, group] = total


@inner
def block_of_product(product, place, block, x, sums, y, first, scratch):
    """One block of `place` (CodedRows.place): its columns of y [T, ..], where the matrix begins at column `first`.
    `product`: PRODUCT; `sums`: group_sums of x; `scratch` fp32 [TOGETHER * BLOCK]."""
    kind, data, groups, count = place
    data += block * groups * _bytes_of(kind)
    here, row, rows = min(BLOCK, count - block * BLOCK), 0, x.shape[0]
    start = first + block * BLOCK
    while row < rows:
        some = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
        call_product(product, kind, some, data, groups, x.ctypes.data + 4 * row * x.shape[1], x.shape[1],
                     sums.ctypes.data + 4 * row * sums.shape[1], sums.shape[1], scratch.ctypes.data)
        for one in range(some):
            for lane in range(here):
                y[row + one, start + lane] = scratch[one * BLOCK + lane]
        row += some


@compiled
def _multiply(thread, threads, sync, product, place, x, y, all_sums, all_scratch, counters):
    sums, scratch = all_sums[thread], all_scratch[thread]
    group_sums(x, sums)
    blocks = (place[3] + BLOCK - 1) // BLOCK
    count = portion(blocks, threads)
    block = take(counters, 0, count)
    while block < blocks:
        for one in range(block, min(block + count, blocks)):
            block_of_product(product, place, one, x, sums, y, 0, scratch)
        block = take(counters, 0, count)
    meet(sync, threads)


@compiled
def _pick(thread, threads, sync, place, ids, out):
    kind, data, groups, _ = place
    nbytes, group = _bytes_of(kind), 16 if kind == SIXTEENS else 32
    step = BLOCK // 2 if kind == FOUR else BLOCK
    for row in range(ids.shape[0]):
        block, lane = ids[row] // BLOCK, ids[row] % BLOCK
        for number in range(groups):
            start = data + (block * groups + number) * nbytes
            found, factors = pointer(start), pointer(start + group * step)
            scale = half_at(factors, lane)
            offset = half_at(factors, BLOCK + lane) if kind == FOUR or kind == OFFSET else np.float32(0)
            for column in range(group):
                if kind == FOUR:
                    code = (code_at(found, column * step + lane % step) >> np.int32(lane // step * 4)) & np.int32(15)
                else:
                    code = signed_at(found, column * step + lane)
                out[row, number * group + column] = np.float32(code) * scale + offset


@compiled
def _unpack(thread, threads, sync, place, first, out, all_scratch, counters):
    kind, data, groups, _ = place
    nbytes, group = _bytes_of(kind), 16 if kind == SIXTEENS else 32
    blocks, offsets, step = out.shape[1] // BLOCK, kind == FOUR or kind == OFFSET, BLOCK // 2 if kind == FOUR else BLOCK
    scale, offset = all_scratch[thread, :BLOCK], all_scratch[thread, BLOCK:2 * BLOCK]
    block = take(counters, 0, 1)
    while block < blocks:
        for number in range(groups):
            start = data + ((first + block) * groups + number) * nbytes
            found, factors = pointer(start), pointer(start + group * step)
            for lane in range(BLOCK):
                scale[lane] = half_at(factors, lane)
                offset[lane] = half_at(factors, BLOCK + lane) if offsets else np.float32(0)
            for column in range(group):
                to = out[number * group + column, block * BLOCK:(block + 1) * BLOCK]
                if kind == FOUR:
                    for lane in range(BLOCK // 2):
                        both = code_at(found, column * step + lane)
                        to[lane] = np.float32(both & 15) * scale[lane] + offset[lane]
                        to[lane + 16] = np.float32(both >> 4) * scale[lane + 16] + offset[lane + 16]
                else:
                    for lane in range(BLOCK):
                        to[lane] = np.float32(signed_at(found, column * step + lane)) * scale[lane] + offset[lane]
        block = take(counters, 0, 1)
    meet(sync, threads)


def multiply(place: tuple[int, int, int, int], x: np.ndarray, y: np.ndarray) -> None:
    """Semantics: y[t, o] = sum_i x[t, i] weight[o, i].  `place`: CodedRows.place; x fp32 [T, d_in], y fp32 [T, rows]."""
    run = team().alone if x.shape[0] * x.shape[1] * y.shape[1] <= ALONE else team().run
    sums = np.empty((team().threads, x.shape[0], x.shape[1] // 32), np.float32)
    run(_multiply, PRODUCT, place, x, y, sums, scratch(), np.zeros(1, np.int64))


def pick(place: tuple[int, int, int, int], ids: np.ndarray, out: np.ndarray) -> None:
    """Semantics: out[t] = weight[ids[t]].  ids int64 [T], out fp32 [T, d_in]"""
    team().alone(_pick, place, ids, out)


def unpack(place: tuple[int, int, int, int], first: int, out: np.ndarray) -> None:
    """The numbers of the blocks from `first` on, as many as fit into `out`, fp32 [d_in, rows]."""
    team().run(_unpack, place, first, out, scratch(), np.zeros(1, np.int64))


def scratch() -> np.ndarray:
    """fp32 [threads, TOGETHER * BLOCK]: for the blocks that each thread computes"""
    return np.empty((team().threads, TOGETHER * BLOCK), np.float32)

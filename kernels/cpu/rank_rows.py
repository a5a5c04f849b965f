"""What adapters add to the linears of a step on a CPU: rank rows in fp32 or bf16, each adapter's by themselves."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import inner
from .row_sums import WIDE, add_rows, add_rows_bf16, dot, dot_bf16
from .team import portion, take
from .vectors import CACHE_LINE, prefetch_at

TILE = WIDE
"""outputs of B whose rank rows lie behind each other"""
ROWS, FIRST_A, END_A, FIRST_B, END_B = range(5)
"""of `Ranks.places`"""
START, END, ADDRESS, BF16, COLUMN, OUT_START, OUT_END = range(7)
"""of `Ranks.a` and `Ranks.b`; A has no outputs"""


class Ranks(NamedTuple):
    """The low-rank deltas of a step, as the compiled functions read them: rank rows of all adapters behind each other, at each linear."""

    places: np.ndarray
    """int64 [layers, 4, 5], by linear: its rank rows (0: nothing acts here), and which of `a` and `b` are its own"""
    a: np.ndarray
    """int64 [n, 7]: rank rows from one to before another, address of A [rows, d_in], whether it is bf16 (else fp32), their column of
    `weights`"""
    b: np.ndarray
    """int64 [n, 7]: rank rows and outputs from one to before another, address of B [tiles of outputs, rows, TILE] (zeros behind the last
    output), whether it is bf16, their column of `weights`"""
    weights: np.ndarray
    """fp32 [T, adapters]"""


@inner
def shrink(threads, ranks, place, x, h, counters, index):
    """Semantics: h[t, k] = weights[t, column of k] * sum_i x[t, i] a[k, i], the tasks of this thread.  `place`: Ranks.places of a linear"""
    number, count = place[FIRST_A], portion(place[ROWS], threads)
    first = take(counters, index, count)
    while first < place[ROWS]:
        for k in range(first, min(first + count, place[ROWS])):
            while k >= ranks.a[number, END]:
                number += 1
            part = ranks.a[number]
            row = part[ADDRESS] + (k - part[START]) * x.shape[1] * (2 if part[BF16] else 4)
            for t in range(x.shape[0]):
                weight = ranks.weights[t, part[COLUMN]]
                if weight != 0:
                    here = x.ctypes.data + 4 * t * x.shape[1]
                    total = dot_bf16(here, row, x.shape[1]) if part[BF16] else dot(here, row, x.shape[1])
                    h[t, k] = weight * total
        first = take(counters, index, count)


@inner
def fetch(thread, threads, ranks, place):
    """Ask for this thread's share of what `expand` will read, in long pieces, which are read faster than its tiles."""
    for number in range(place[FIRST_B], place[END_B]):
        part = ranks.b[number]
        tiles = (part[OUT_END] - part[OUT_START] + TILE - 1) // TILE
        share = tiles * (part[END] - part[START]) * TILE * (2 if part[BF16] else 4) // threads
        for line in range(part[ADDRESS] + thread * share, part[ADDRESS] + (thread + 1) * share, CACHE_LINE):
            prefetch_at(line)


@inner
def expand(ranks, place, row, h, y, first, end, scratch):
    """Semantics: y[o] += sum_k h[k] b[k, o] for the outputs from `first` to before `end`, of the token `row`.

    h [K], of which only rank rows of weights other than zero are read, and y [d_out] fp32; scratch fp32 [TILE or more]
    """
    for number in range(place[FIRST_B], place[END_B]):
        part = ranks.b[number]
        start, stop = max(first, part[OUT_START]) - part[OUT_START], min(end, part[OUT_END]) - part[OUT_START]
        if start >= stop or ranks.weights[row, part[COLUMN]] == 0:
            continue
        rows, nbytes = part[END] - part[START], 2 if part[BF16] else 4
        for tile in range(start // TILE, (stop + TILE - 1) // TILE):
            here = part[ADDRESS] + nbytes * tile * rows * TILE
            for lane in range(TILE):
                scratch[lane] = np.float32(0)
            if part[BF16]:
                add_rows_bf16(h.ctypes.data + 4 * part[START], here, 2 * TILE, rows, scratch.ctypes.data)
            else:
                add_rows(h.ctypes.data + 4 * part[START], here, 4 * TILE, rows, scratch.ctypes.data)
            for output in range(max(start, tile * TILE), min(stop, (tile + 1) * TILE)):
                y[part[OUT_START] + output] += scratch[output - tile * TILE]

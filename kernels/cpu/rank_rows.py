"""What adapters add to the linears of a step on a CPU: rank rows in fp32 or bf16, as they lie."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import inner, summing
from .team import take
from .vectors import bf16_at, float_at, pointer

SHRUNK = 4
"""rank rows that a thread takes at once"""
TOGETHER = 4
"""rank rows that are added at once"""
ADDRESS, ROWS, BF16, WEIGHTS, FIRST, END = range(6)
"""of `Ranks.places`"""
ROW_START, ROW_END, OUT_START, OUT_END, B_ADDRESS, B_BF16 = range(6)
"""of `Ranks.slices`"""


class Ranks(NamedTuple):
    """The low-rank deltas of a step, as the compiled functions read them."""

    places: np.ndarray
    """int64 [layers, 4, 6], by linear: address of A [rows, d_in], its rows (0: nothing acts here), whether they are bf16 (else fp32),
    how many rank rows of `weights` are before its own, its slices from one to before another"""
    slices: np.ndarray
    """int64 [n, 6]: rank rows of one adapter from one to before another act on outputs from one to before another; address of B [rows,
    outputs] of these, whether it is bf16"""
    weights: np.ndarray
    """fp32: row weights of tokens and rank rows, one layout behind the other"""


@summing
def _dot(x, a, bf16):
    """Semantics: sum_i x[i] a[i].  x fp32 [n]; `a` the address of n numbers, bf16 or fp32"""
    total = np.float32(0)
    row = pointer(a)
    if bf16:
        for place in range(x.shape[0]):
            total += x[place] * bf16_at(row, place)
    else:
        for place in range(x.shape[0]):
            total += x[place] * float_at(row, place)
    return total


@inner
def shrink(place, weights, x, h, counters, index):
    """Semantics: h[t, k] = weights[t, k] * sum_i x[t, i] a[k, i], the tasks of this thread.  `place`: Ranks.places of a linear"""
    rows, nbytes = place[ROWS], x.shape[1] * (2 if place[BF16] else 4)
    first = take(counters, index, SHRUNK)
    while first < rows:
        for k in range(first, min(first + SHRUNK, rows)):
            for t in range(x.shape[0]):
                weight = weights[place[WEIGHTS] * x.shape[0] + t * rows + k]
                h[t, k] = weight * _dot(x[t], place[ADDRESS] + k * nbytes, place[BF16]) if weight != 0 else np.float32(0)
        first = take(counters, index, SHRUNK)


@summing
def expand(place, slices, h, y, first, end):
    """Semantics: y[o] += sum_k h[k] b[k, o] for the outputs from `first` to before `end`, of one token.  h [K], y [d_out] fp32"""
    for number in range(place[FIRST], place[END]):
        part = slices[number]
        start, stop, width = max(first, part[OUT_START]), min(end, part[OUT_END]), part[OUT_END] - part[OUT_START]
        if start >= stop:
            continue
        out, nbytes = y[start:stop], 2 if part[B_BF16] else 4
        for k in range(part[ROW_START], part[ROW_END], TOGETHER):
            # four at once, for the outputs are read and written each time; behind the last it is taken again, times zero
            last = part[ROW_END] - 1
            a, b = h[k], h[k + 1] if k + 1 <= last else np.float32(0)
            c, d = h[k + 2] if k + 2 <= last else np.float32(0), h[k + 3] if k + 3 <= last else np.float32(0)
            if a == 0 and b == 0 and c == 0 and d == 0:
                continue
            row = pointer(part[B_ADDRESS] + nbytes * ((k - part[ROW_START]) * width + start - part[OUT_START]))
            second, third, fourth = min(k + 1, last) - k, min(k + 2, last) - k, min(k + 3, last) - k
            if part[B_BF16]:
                for o in range(out.shape[0]):
                    out[o] += (a * bf16_at(row, o) + b * bf16_at(row, o + second * width)) + (
                        c * bf16_at(row, o + third * width) + d * bf16_at(row, o + fourth * width))
            else:
                for o in range(out.shape[0]):
                    out[o] += (a * float_at(row, o) + b * float_at(row, o + second * width)) + (
                        c * float_at(row, o + third * width) + d * float_at(row, o + fourth * width))

"""Attention of one query head over keys and values where they lie."""
from __future__ import annotations

import numpy as np

from .compiled import inner, summing
from .row_sums import LANES, WIDE, add_rows, add_rows_narrow, dot
from .vectors import exp


@inner
def attend(q, keys, values, runs, skip, length, scale, softcap, scores, out):
    """Semantics: out = softmax(cap(scale * q k^T)) v over the first `length` tokens of `runs` but for the first `skip`.

    cap(s) = softcap * tanh(s / softcap), s where softcap is 0; where q is not finite, neither is out.

    q, out fp32 [d], d a multiple of LANES; keys, values fp32 [cells, d]; runs int64 [n, 2]: first cell and cells of consecutive runs;
    scores fp32 [length or more]
    """
    d, seen, passed = q.shape[0], 0, 0
    for run in range(runs.shape[0]):
        count = min(runs[run, 1], length - passed)
        for cell in range(runs[run, 0] + min(count, max(0, skip - passed)), runs[run, 0] + count):
            scores[seen] = scale * dot(q.ctypes.data, keys.ctypes.data + 4 * d * cell, d)
            seen += 1
        passed += count
    if softcap:
        _cap(scores[:seen], softcap)
    whole = _shares(scores[:seen])
    for place in range(d):
        out[place] = np.float32(0) * q[place] if softcap else np.float32(0)
    seen = passed = 0
    for run in range(runs.shape[0]):
        count = min(runs[run, 1], length - passed)
        left_out = min(count, max(0, skip - passed))
        passed += count
        count -= left_out
        first = values.ctypes.data + 4 * d * (runs[run, 0] + left_out)
        factors, start = scores.ctypes.data + 4 * seen, 0
        while start < d:
            if d - start >= WIDE:
                add_rows(factors, first + 4 * start, 4 * d, count, out.ctypes.data + 4 * start)
                start += WIDE
            else:
                add_rows_narrow(factors, first + 4 * start, 4 * d, count, out.ctypes.data + 4 * start)
                start += LANES
        seen += count
    for place in range(d):
        out[place] /= whole


@summing
def _cap(scores, softcap):
    """softcap * tanh(score / softcap) in place."""
    for token in range(scores.shape[0]):
        scores[token] = softcap - np.float32(2) * softcap / (np.float32(1) + exp(scores[token] * (np.float32(2) / softcap)))


@summing
def _shares(scores):
    """e^(score - the greatest) in place; their sum."""
    most = scores[0]
    for token in range(scores.shape[0]):
        most = scores[token] if scores[token] > most else most
    whole = np.float32(0)
    for token in range(scores.shape[0]):
        scores[token] = exp(scores[token] - most)
        whole += scores[token]
    return whole

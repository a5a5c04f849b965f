"""Attention of one query head over keys and values where they lie."""
from __future__ import annotations

import numpy as np

from .compiled import summing
from .vectors import exp


@summing
def attend(q, keys, values, runs, length, scale, scores, out):
    """Semantics: out = softmax(scale * q k^T) v over the first `length` tokens of `runs`.

    q, out fp32 [d]; keys, values fp32 [cells, d]; runs int64 [n, 2]: first cell and cells of consecutive runs; scores fp32 [length or more]
    """
    d, seen = q.shape[0], 0
    most = np.float32(-np.inf)
    for run in range(runs.shape[0]):
        first, count = runs[run, 0], min(runs[run, 1], length - seen)
        for cell in range(first, first + count):
            total = np.float32(0)
            for place in range(d):
                total += q[place] * keys[cell, place]
            total *= scale
            scores[seen] = total
            seen += 1
            most = total if total > most else most
    whole = np.float32(0)
    for token in range(length):
        scores[token] = exp(scores[token] - most)
        whole += scores[token]
    for place in range(d):
        out[place] = np.float32(0)
    seen = 0
    for run in range(runs.shape[0]):
        first, count = runs[run, 0], min(runs[run, 1], length - seen)
        for cell in range(first, first + count):
            share = scores[seen]
            seen += 1
            for place in range(d):
                out[place] += share * values[cell, place]
    for place in range(d):
        out[place] /= whole

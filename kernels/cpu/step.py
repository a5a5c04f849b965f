"""A decoder's layers for a step of replies on a CPU, in one call of all threads.

Between what needs all of something that others compute the threads meet; within, each takes the next task that nobody has. Norms and the
sums of groups are a few microseconds, so every thread makes them for itself. A row's numbers do not depend on the rows beside it, nor on
how many threads there are.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .attention import attend
from .block_product import BLOCK
from .compiled import compiled, inner, summing
from .products import block_of_product, group_sums
from .rank_rows import ROWS, TILE, expand, fetch, shrink
from .team import meet, portion, take
from .vectors import exp, ticks

QKV, OUT, GATE_UP, DOWN = range(4)
"""linears of a layer"""
PARTS = ("base matmul", "shrink", "expand", "attention", "other")
"""of the time of a step"""
BASE, SHRINK, EXPAND, ATTENTION, OTHER = range(5)
COUNTERS = 15
"""of tasks, a layer"""
BEFORE_ATTENTION, BEFORE_MLP, AFTER_ATTENTION, AFTER_MLP = range(4)
"""norms of a layer"""
Q_NORM, K_NORM = range(2)


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    eps: np.float32
    scale: np.float32
    """of the scores"""
    softcap: np.float32
    """c of c tanh(score / c); 0 for none"""
    joined: np.float32
    """of what is added to the residual stream"""
    gelu: bool
    """gates are GELU by tanh, not SiLU"""
    norms_after: bool
    """what is added is normed before"""
    head_norms: bool
    """q and k are normed, each head by itself"""


class Base(NamedTuple):
    product: int
    """PRODUCT"""
    parts: np.ndarray
    """int64 [n, 5]: CodedRows.place of a part of a linear, and its first output"""
    linears: np.ndarray
    """int64 [layers, 4, 2]: the parts of a linear, from one to before another"""
    biases: np.ndarray
    """fp32 [layers, outputs of all four], zeros where there are none"""
    has_bias: np.ndarray
    """bool [layers, 4]"""
    norms: np.ndarray
    """fp32 [layers, 4, hidden]; those that there are not are zeros"""
    head_norms: np.ndarray
    """fp32 [layers, 2, head_dim]"""
    ropes: np.ndarray
    """int64 [layers]: the table by which heads are turned, -1 where they are not"""
    windows: np.ndarray
    """int64 [layers]: tokens that a row looks at, itself included; 0 for all"""


class Rows(NamedTuple):
    """What the rows of a step look at."""

    cos: np.ndarray
    """fp32 [tables, T, rotary], and `sin`, whose first half is negated"""
    sin: np.ndarray
    cells: np.ndarray
    """int64 [T]: where its key and its value go"""
    lengths: np.ndarray
    """int64 [T]: tokens that it looks at, itself the last"""
    run_of: np.ndarray
    """int64 [T + 1]: its first run, and that of the next row"""
    runs: np.ndarray
    """int64 [n, 2]: first cell, cells"""


class Buffers(NamedTuple):
    """fp32 [T, ..]. x: the residual stream, in and out."""

    x: np.ndarray
    normed: np.ndarray
    """[threads, T, hidden]; those with threads are each thread's own"""
    totals: np.ndarray
    """[threads, T, most inputs of a linear / 32]"""
    scores: np.ndarray
    """[threads, most tokens that a row looks at]"""
    scratch: np.ndarray
    """[threads, TOGETHER * BLOCK]"""
    qkv: np.ndarray
    """[T, heads of q, k and v * head_dim]"""
    mixed: np.ndarray
    """[T, heads * head_dim]: what attention found"""
    joining: np.ndarray
    """[T, hidden]: what is added to x next, before its norm"""
    gate_up: np.ndarray
    """[T, 2 * intermediate]"""
    gated: np.ndarray
    """[T, intermediate]"""
    h: np.ndarray
    """[T, most rank rows of a linear]"""


@inner
def _norm(x, weight, eps, out):
    """Semantics: out = x / sqrt(mean(x^2) + eps) * weight, row by row.  x, out [T, hidden], weight [hidden]"""
    for row in range(x.shape[0]):
        _norm_row(x[row], weight, eps, out[row])


@summing
def _norm_row(x, weight, eps, out):
    """Of one row; x and out may be the same."""
    total = np.float32(0)
    for place in range(x.shape[0]):
        total += x[place] * x[place]
    factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for place in range(x.shape[0]):
        out[place] = x[place] * factor * weight[place]


@inner
def _products(threads, base, layer, linear, x, sums, y, scratch, counters, index):
    """The base product of a linear, the blocks of this thread."""
    first, end = base.linears[layer, linear, 0], base.linears[layer, linear, 1]
    blocks = 0
    for part in range(first, end):
        blocks += (base.parts[part, 3] + BLOCK - 1) // BLOCK
    count = portion(blocks, threads)
    block = take(counters, index, count)
    while block < blocks:
        for one in range(block, min(block + count, blocks)):
            part, here = first, one
            while here >= (base.parts[part, 3] + BLOCK - 1) // BLOCK:
                here -= (base.parts[part, 3] + BLOCK - 1) // BLOCK
                part += 1
            place = base.parts[part]
            block_of_product(base.product, (place[0], place[1], place[2], place[3]), here, x, sums, y, place[4], scratch)
        block = take(counters, index, count)


@inner
def _add(y, bias):
    """y += bias, both [n]"""
    for place in range(y.shape[0]):
        y[place] += bias[place]


@inner
def _join(x, y, scale):
    """x += scale * y, both [n]"""
    for place in range(x.shape[0]):
        x[place] += scale * y[place]


@summing
def _turn(x, cos, sin):
    """RoPE of the numbers of a head that it turns [rotary], in place: x * cos + (x's halves exchanged) * sin."""
    half = x.shape[0] // 2
    for place in range(half):
        first, second = x[place], x[place + half]
        x[place] = first * cos[place] + second * sin[place]
        x[place + half] = second * cos[place + half] + first * sin[place + half]


@inner
def _copy(x, out):
    """out = x, both [n]"""
    for place in range(x.shape[0]):
        out[place] = x[place]


@summing
def _gate(gate, up, out):
    """out = silu(gate) * up, all [n]"""
    for place in range(out.shape[0]):
        out[place] = gate[place] / (np.float32(1) + exp(-gate[place])) * up[place]


@summing
def _gate_gelu(gate, up, out):
    """out = gelu(gate) * up, by tanh, all [n]"""
    for place in range(out.shape[0]):
        g = gate[place]
        turns = np.float32(1.5957691216057308) * (g + np.float32(0.044715) * g * g * g)
        out[place] = g / (np.float32(1) + exp(-turns)) * up[place]


@inner
def _tick(thread, spent, part, since):
    """Add the time since `since` to a part; now."""
    if thread:
        return since
    now = ticks()
    spent[part] += now - since
    return now


@compiled
def decode_step(thread, threads, sync, sizes, base, rows, ranks, caches, buffers, counters, spent):
    """`buffers.x` of a step's tokens through all layers; their keys and values go into `caches`, fp32 [layers, 2, kv_heads, cells, d].

    Sizes, Base, Rows, Ranks, Buffers; counters int64 [COUNTERS * layers] zeros; spent int64 [len(PARTS)]: ticks of the first thread by
    part are added.
    """
    x, qkv, mixed, gate_up, gated, h = buffers.x, buffers.qkv, buffers.mixed, buffers.gate_up, buffers.gated, buffers.h
    count, hidden, d = x.shape[0], x.shape[1], caches.shape[4]
    heads, kv_heads, gates = sizes.heads, sizes.kv_heads, gated.shape[1]
    group, width = heads // kv_heads, qkv.shape[1]
    normed, sums, scores, scratch = buffers.normed[thread], buffers.totals[thread], buffers.scores[thread], buffers.scratch[thread]
    now = ticks()
    for layer in range(caches.shape[0]):
        at = COUNTERS * layer
        rope, window = base.ropes[layer], base.windows[layer]
        # qkv
        _norm(x, base.norms[layer, BEFORE_ATTENTION], sizes.eps, normed)
        group_sums(normed, sums)
        place = ranks.places[layer, QKV]
        now = _tick(thread, spent, OTHER, now)
        if place[ROWS]:
            shrink(threads, ranks, place, normed, h, counters, at)
            fetch(thread, threads, ranks, place)
            now = _tick(thread, spent, SHRINK, now)
        _products(threads, base, layer, QKV, normed, sums, qkv, scratch, counters, at + 1)
        meet(sync, threads)
        now = _tick(thread, spent, BASE, now)
        # heads: what adapters add to them, RoPE, keys and values to the cache
        task = take(counters, at + 2, 1)
        while task < count * (heads + 2 * kv_heads):
            row, head = task // (heads + 2 * kv_heads), task % (heads + 2 * kv_heads)
            first, end = head * d, (head + 1) * d
            here = qkv[row, first:end]
            if base.has_bias[layer, QKV]:
                _add(here, base.biases[layer, first:end])
            if place[ROWS]:
                expand(ranks, place, row, h[row], qkv[row], first, end, scratch)
                now = _tick(thread, spent, EXPAND, now)
            if head < heads + kv_heads:
                if sizes.head_norms:
                    _norm_row(here, base.head_norms[layer, Q_NORM if head < heads else K_NORM], sizes.eps, here)
                if rope >= 0:
                    _turn(here[:rows.cos.shape[2]], rows.cos[rope, row], rows.sin[rope, row])
            if head >= heads:
                _copy(here, caches[layer, (head - heads) // kv_heads, (head - heads) % kv_heads, rows.cells[row]])
            now = _tick(thread, spent, OTHER, now)
            task = take(counters, at + 2, 1)
        meet(sync, threads)
        now = _tick(thread, spent, OTHER, now)
        task = take(counters, at + 3, 1)
        while task < count * heads:
            row, head = task // heads, task % heads
            length = rows.lengths[row]
            attend(qkv[row, head * d:(head + 1) * d], caches[layer, 0, head // group], caches[layer, 1, head // group],
                   rows.runs[rows.run_of[row]:rows.run_of[row + 1]], max(0, length - window) if window else 0, length, sizes.scale,
                   sizes.softcap, scores, mixed[row, head * d:(head + 1) * d])
            task = take(counters, at + 3, 1)
        meet(sync, threads)
        now = _tick(thread, spent, ATTENTION, now)
        now = _joined(thread, threads, sync, sizes, base, ranks, layer, OUT, AFTER_ATTENTION, width, mixed, sums, buffers, scratch,
                      counters, at + 4, spent, now)
        # MLP
        _norm(x, base.norms[layer, BEFORE_MLP], sizes.eps, normed)
        group_sums(normed, sums)
        place = ranks.places[layer, GATE_UP]
        now = _tick(thread, spent, OTHER, now)
        if place[ROWS]:
            shrink(threads, ranks, place, normed, h, counters, at + 8)
            fetch(thread, threads, ranks, place)
            now = _tick(thread, spent, SHRINK, now)
        _products(threads, base, layer, GATE_UP, normed, sums, gate_up, scratch, counters, at + 9)
        meet(sync, threads)
        now = _tick(thread, spent, BASE, now)
        start = width + hidden
        in_row = (gates + TILE - 1) // TILE
        some = min(in_row, portion(count * in_row, threads))
        in_row = (in_row + some - 1) // some
        task = take(counters, at + 10, 1)
        while task < count * in_row:
            row, first = task // in_row, task % in_row * some * TILE
            end = min(first + some * TILE, gates)
            if base.has_bias[layer, GATE_UP]:
                _add(gate_up[row, first:end], base.biases[layer, start + first:start + end])
                _add(gate_up[row, gates + first:gates + end], base.biases[layer, start + gates + first:start + gates + end])
            if place[ROWS]:
                expand(ranks, place, row, h[row], gate_up[row], first, end, scratch)
                expand(ranks, place, row, h[row], gate_up[row], gates + first, gates + end, scratch)
                now = _tick(thread, spent, EXPAND, now)
            if sizes.gelu:
                _gate_gelu(gate_up[row, first:end], gate_up[row, gates + first:gates + end], gated[row, first:end])
            else:
                _gate(gate_up[row, first:end], gate_up[row, gates + first:gates + end], gated[row, first:end])
            now = _tick(thread, spent, OTHER, now)
            task = take(counters, at + 10, 1)
        meet(sync, threads)
        now = _tick(thread, spent, OTHER, now)
        now = _joined(thread, threads, sync, sizes, base, ranks, layer, DOWN, AFTER_MLP, start + 2 * gates, gated, sums, buffers, scratch,
                      counters, at + 11, spent, now)


@inner
def _joined(thread, threads, sync, sizes, base, ranks, layer, linear, after, bias, x, sums, buffers, scratch, counters, index, spent, now):
    """The residual stream, and the linear of x [T, d_in] more; the time now. `after`: the norm of it; `bias`: where its bias begins."""
    group_sums(x, sums)
    place, stream, y = ranks.places[layer, linear], buffers.x, buffers.joining
    now = _tick(thread, spent, OTHER, now)
    if place[ROWS]:
        shrink(threads, ranks, place, x, buffers.h, counters, index)
        fetch(thread, threads, ranks, place)
        now = _tick(thread, spent, SHRINK, now)
    _products(threads, base, layer, linear, x, sums, y, scratch, counters, index + 1)
    meet(sync, threads)
    now = _tick(thread, spent, BASE, now)
    tiles = (stream.shape[1] + TILE - 1) // TILE
    some = min(tiles, portion(stream.shape[0] * tiles, threads))
    tiles = (tiles + some - 1) // some
    task = take(counters, index + 2, 1)
    while task < stream.shape[0] * tiles:
        row, first = task // tiles, task % tiles * some * TILE
        end = min(first + some * TILE, stream.shape[1])
        if base.has_bias[layer, linear]:
            _add(y[row, first:end], base.biases[layer, bias + first:bias + end])
        if place[ROWS]:
            expand(ranks, place, row, buffers.h[row], y[row], first, end, scratch)
            now = _tick(thread, spent, EXPAND, now)
        if not sizes.norms_after:
            _join(stream[row, first:end], y[row, first:end], sizes.joined)
        task = take(counters, index + 2, 1)
    meet(sync, threads)
    if sizes.norms_after:
        row = take(counters, index + 3, 1)
        while row < stream.shape[0]:
            _norm_row(y[row], base.norms[layer, after], sizes.eps, y[row])
            _join(stream[row], y[row], sizes.joined)
            row = take(counters, index + 3, 1)
        meet(sync, threads)
    return _tick(thread, spent, OTHER, now)

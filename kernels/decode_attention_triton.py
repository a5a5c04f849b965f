"""The Triton form of `decode_attention`: one launch, each request's tokens shared out among programs, their parts joined in order.

A program takes a stretch of one row's tokens for all query heads that share keys: they are the rows of its products. How many stretches
there are, and so what is added to what, follows from the row's own position and the model: its bits do not depend on the other rows, on
the longest request, nor on where blocks lie. The program that ends last joins the parts, first to last.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .triton_compat import tl, triton


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap)"""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return softcap - 2.0 * softcap / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / softcap)))


@triton.jit
def _heads(row, head, there, weight, cos, sin, eps,
           SIZE: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORMED: tl.constexpr):
    """Heads `head` [n] of a row of qkv, normed and turned: [n, WIDTH] in its dtype, zeros from SIZE on and where not `there`."""
    dtype = row.dtype.element_ty
    d = tl.arange(0, WIDTH)
    places = row + head[:, None] * SIZE
    x = tl.load(places + d[None, :], mask=there[:, None] & (d < SIZE)[None, :], other=0.0).to(tl.float32)
    if NORMED:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = (x * rstd * tl.load(weight + d, mask=d < SIZE, other=0.0).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    if ROTARY:
        turns = d < ROTARY
        across = tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2)
        y = tl.load(places + across[None, :], mask=there[:, None] & turns[None, :], other=0.0).to(tl.float32)
        if NORMED:
            y = (y * rstd * tl.load(weight + across, mask=turns, other=0.0).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        x = x * tl.load(cos + d, mask=turns, other=1.0)[None, :] + y * tl.load(sin + d, mask=turns, other=0.0)[None, :]
    return x.to(dtype)


@triton.jit(do_not_specialize=["blocks", "table_width", "window", "stamp_index"])
def decode_attention_kernel(
    qkv, cache, out, positions, rope_rows, tables, cos, sin, q_norm, k_norm, parts, sums, arrived, stamps, stamp_index,
    blocks, table_width, window, scale, softcap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr,
    NORMED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, STAMPED: tl.constexpr,
    QUERIES: tl.constexpr, GROUP_ROWS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):
    """QUERIES: rows of the products, GROUP_ROWS: the query heads of a key's head, both as powers of two; SPLITS: most programs of a row's
    head; LEAST: fewest tokens of one; TILE: tokens read at once."""
    t = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    if STAMPED:
        if t + h + split == 0:
            tl.store(stamps + stamp_index, tl.extra.cuda.globaltimer())
    GROUP: tl.constexpr = HEADS // KV_HEADS
    LOG2_E: tl.constexpr = 1.4426950408889634
    dtype = qkv.dtype.element_ty
    position = tl.load(positions + t)
    first = 0
    if WINDOWED:
        first = tl.maximum(0, position + 1 - window)
    stretch = tl.maximum(LEAST, tl.cdiv(tl.cdiv(position - first, SPLITS), TILE) * TILE)
    splits = tl.maximum(1, tl.cdiv(position - first, stretch))
    if (position >= 0) & (split < splits):
        g = tl.arange(0, QUERIES)
        d = tl.arange(0, WIDTH)
        inside = d < SIZE
        row = qkv + t.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * SIZE)
        if ROTARY:
            turn = tl.load(rope_rows + t).to(tl.int64) * ROTARY
            cos += turn
            sin += turn
        q = _heads(row, h * GROUP + g, g < GROUP, q_norm, cos, sin, eps, SIZE, WIDTH, ROTARY, NORMED)
        table = tables + t * table_width
        keys = cache + h.to(tl.int64) * blocks * (BLOCK * SIZE)
        values = keys + KV_HEADS * blocks.to(tl.int64) * (BLOCK * SIZE)
        to_exp2 = LOG2_E if SOFTCAP else scale * LOG2_E
        most = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        if split == 0:  # takes the row's own token too, and keeps its key and value
            one = tl.arange(0, 1)
            k_new = _heads(row, HEADS + h + one, one == 0, k_norm, cos, sin, eps, SIZE, WIDTH, ROTARY, NORMED)
            v_new = tl.load(row + (HEADS + KV_HEADS + h) * SIZE + d, mask=inside, other=0.0)
            cell = (tl.load(table + position // BLOCK).to(tl.int64) * BLOCK + position % BLOCK) * SIZE
            tl.store(keys + cell + d[None, :], k_new, mask=inside[None, :])
            tl.store(values + cell + d, v_new, mask=inside)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1)
            if SOFTCAP:
                score = capped(score * scale, softcap)
            most = score * to_exp2
            total += 1.0
            acc += v_new.to(tl.float32)[None, :]
        begin = first + split * stretch
        end = tl.minimum(position, begin + stretch)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            key = start + tl.arange(0, TILE)
            there = key < end
            block = tl.load(table + key // BLOCK, mask=there, other=0).to(tl.int64)
            cell = (block * BLOCK + key % BLOCK) * SIZE
            k = tl.load(keys + cell[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee")
            if SOFTCAP:
                scores = capped(scores * scale, softcap)
            scores = tl.where(there[None, :], scores * to_exp2, float("-inf"))
            above = tl.maximum(most, tl.max(scores, 1))
            p = tl.exp2(scores - above[:, None])
            fade = tl.exp2(most - above)
            total = total * fade + tl.sum(p, 1)
            v = tl.load(values + cell[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(p.to(dtype), v, acc * fade[:, None], input_precision="ieee")
            most = above
        if SOFTCAP:
            acc += q.to(tl.float32) * 0.0  # the cap would hide a query that is not finite
        written = out + t.to(tl.int64) * (HEADS * SIZE) + h * (GROUP * SIZE)
        if splits == 1:
            tl.store(written + g[:, None] * SIZE + d[None, :], (acc / total[:, None]).to(dtype),
                     mask=(g < GROUP)[:, None] & inside[None, :])
        else:
            part = (t * KV_HEADS + h) * SPLITS
            tl.store(parts + ((part + split) * GROUP + g)[:, None] * WIDTH + d[None, :], acc, mask=(g < GROUP)[:, None])
            tl.store(sums + (part + split) * (2 * GROUP) + g, most, mask=g < GROUP)
            tl.store(sums + (part + split) * (2 * GROUP) + GROUP + g, total, mask=g < GROUP)
            tl.debug_barrier()
            if tl.atomic_add(arrived + t * KV_HEADS + h, 1, sem="acq_rel") == splits - 1:
                tl.store(arrived + t * KV_HEADS + h, 0)
                _join(written, parts + part * GROUP * WIDTH, sums + part * (2 * GROUP), splits, GROUP, GROUP_ROWS, SIZE, WIDTH, SPLITS)


@triton.jit
def _join(written, parts, sums, splits, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
          SPLITS: tl.constexpr):
    """Put the parts of a row's heads together. parts [splits, GROUP, WIDTH], sums [splits, 2, GROUP]: largest score, sum of weights."""
    AT_ONCE: tl.constexpr = 8
    g = tl.arange(0, GROUP_ROWS)
    d = tl.arange(0, WIDTH)
    s = tl.arange(0, SPLITS)
    there = (s < splits)[:, None] & (g < GROUP)[None, :]
    at = s[:, None] * (2 * GROUP) + g[None, :]
    most = tl.load(sums + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    above = tl.max(most, 0)
    total = tl.sum(tl.load(sums + at + GROUP, mask=there, other=0.0, cache_modifier=".cg") * tl.exp2(most - above[None, :]), 0)
    acc = tl.zeros((GROUP_ROWS, WIDTH), tl.float32)
    for first in range(0, splits, AT_ONCE):
        for offset in tl.static_range(AT_ONCE):
            split = first + offset
            held = g < tl.where(split < splits, GROUP, 0)
            weight = tl.exp2(tl.load(sums + split * (2 * GROUP) + g, mask=held, other=float("-inf"), cache_modifier=".cg") - above)
            part = tl.load(parts + (split * GROUP + g)[:, None] * WIDTH + d[None, :], mask=held[:, None], other=0.0, cache_modifier=".cg")
            acc += part * weight[:, None]
    tl.store(written + g[:, None] * SIZE + d[None, :], (acc / total[:, None]).to(written.dtype.element_ty),
             mask=(g < GROUP)[:, None] & (d < SIZE)[None, :])

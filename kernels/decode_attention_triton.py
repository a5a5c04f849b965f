"""The Triton form of `decode_attention`: one launch, each request's tokens shared out among programs, their parts joined in order.

A program takes stretches of one row's tokens for all query heads that share keys: they are the rows of its products. How many stretches
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
def _heads(row, h, cos, sin, q_norm, k_norm, eps, HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
           QUERIES: tl.constexpr, ROTARY: tl.constexpr, NORMED: tl.constexpr):
    """The query heads of key head `h` and, behind them, its key, normed and turned: [QUERIES, WIDTH] in the dtype of `row`, else zeros."""
    dtype = row.dtype.element_ty
    g = tl.arange(0, QUERIES)
    d = tl.arange(0, WIDTH)
    query = (g < GROUP)[:, None]
    there = (g <= GROUP)[:, None]
    places = row + tl.where(query, (h * GROUP + g)[:, None], HEADS + h) * SIZE
    x = tl.load(places + d[None, :], mask=there & (d < SIZE)[None, :], other=0.0).to(tl.float32)
    if NORMED:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        weight = tl.where(query, tl.load(q_norm + d, mask=d < SIZE, other=0.0)[None, :],
                          tl.load(k_norm + d, mask=d < SIZE, other=0.0)[None, :])
        x = (x * rstd * weight.to(tl.float32)).to(dtype).to(tl.float32)
    if ROTARY:
        turns = d < ROTARY
        across = tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2)
        y = tl.load(places + across[None, :], mask=there & turns[None, :], other=0.0).to(tl.float32)
        if NORMED:
            weight = tl.where(query, tl.load(q_norm + across, mask=turns, other=0.0)[None, :],
                              tl.load(k_norm + across, mask=turns, other=0.0)[None, :])
            y = (y * rstd * weight.to(tl.float32)).to(dtype).to(tl.float32)
        x = x * tl.load(cos + d, mask=turns, other=1.0)[None, :] + y * tl.load(sin + d, mask=turns, other=0.0)[None, :]
    return x.to(dtype)


@triton.jit(do_not_specialize=["blocks", "table_width", "window", "stamp_index"])
def decode_attention_kernel(
    qkv, cache, out, positions, rope_rows, tables, cos, sin, q_norm, k_norm, parts, sums, arrived, stamps, stamp_index,
    blocks, table_width, window, scale, softcap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr,
    NORMED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, STAMPED: tl.constexpr,
    QUERIES: tl.constexpr, GROUP_ROWS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    JOINED: tl.constexpr,
):
    """QUERIES: rows of the products; GROUP_ROWS: the query heads of a key's head, as a power of two; SPLITS: most stretches of a row;
    LEAST: fewest tokens of one; TILE: tokens read at once; JOINED: parts read at once. Program z takes stretches z, z + programs, ..."""
    t = tl.program_id(0)
    h = tl.program_id(1)
    z = tl.program_id(2)
    if STAMPED:
        if t + h + z == 0:
            tl.store(stamps + stamp_index, tl.extra.cuda.globaltimer())
    GROUP: tl.constexpr = HEADS // KV_HEADS
    LOG2_E: tl.constexpr = 1.4426950408889634
    dtype = qkv.dtype.element_ty
    position = tl.load(positions + t)
    if ROTARY:
        turn = tl.load(rope_rows + t).to(tl.int64) * ROTARY
        cos += turn
        sin += turn
    first = 0
    if WINDOWED:
        first = tl.maximum(0, position + 1 - window)
    stretch = tl.maximum(LEAST, tl.cdiv(tl.cdiv(position - first, SPLITS), TILE) * TILE)
    splits = tl.maximum(1, tl.cdiv(position - first, stretch))
    if (position >= 0) & (z < splits):
        g = tl.arange(0, QUERIES)
        d = tl.arange(0, WIDTH)
        inside = d < SIZE
        row = qkv + t.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * SIZE)
        table = tables + t * table_width
        keys = cache + h.to(tl.int64) * blocks * (BLOCK * SIZE)
        values = keys + KV_HEADS * blocks.to(tl.int64) * (BLOCK * SIZE)
        here = tl.load(table + position // BLOCK).to(tl.int64)
        v_new = tl.load(row + (HEADS + KV_HEADS + h) * SIZE + d, mask=inside, other=0.0)
        q = _heads(row, h, cos, sin, q_norm, k_norm, eps, HEADS, GROUP, SIZE, WIDTH, QUERIES, ROTARY, NORMED)
        k_new = tl.sum(tl.where((g == GROUP)[:, None], q.to(tl.float32), 0.0), 0)
        if z == 0:
            cell = (here * BLOCK + position % BLOCK) * SIZE
            tl.store(keys + cell + d, k_new.to(dtype), mask=inside)
            tl.store(values + cell + d, v_new, mask=inside)
        own = tl.sum(q.to(tl.float32) * k_new[None, :], 1)
        to_exp2 = LOG2_E if SOFTCAP else scale * LOG2_E
        if SOFTCAP:  # which would hide a query that is not finite
            own = capped(own * scale, softcap) + tl.sum(q.to(tl.float32) * 0.0, 1)
        written = out + t.to(tl.int64) * (HEADS * SIZE) + h * (GROUP * SIZE)
        part = (t * KV_HEADS + h) * SPLITS
        for split in tl.range(z, splits, tl.num_programs(2), num_stages=1):
            most = tl.full((QUERIES,), float("-inf"), tl.float32)
            total = tl.zeros((QUERIES,), tl.float32)
            acc = tl.zeros((QUERIES, WIDTH), tl.float32)
            if split == 0:  # takes the row's own token too
                most = own * to_exp2
                total += tl.exp2(most - most)  # 1, or NaN where the product is not finite
                acc += v_new.to(tl.float32)[None, :]
            begin = first + split * stretch
            end = tl.minimum(position, begin + stretch)
            for start in tl.range(begin, end, TILE, num_stages=STAGES):
                key = start + tl.arange(0, TILE)
                there = key < end
                block = tl.load(table + key // BLOCK, mask=there, other=0)
                cell = block * (BLOCK * SIZE) + key % BLOCK * SIZE
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
            if splits == 1:
                tl.store(written + g[:, None] * SIZE + d[None, :], (acc / total[:, None]).to(dtype),
                         mask=(g < GROUP)[:, None] & inside[None, :])
            else:
                tl.store(parts + ((part + split) * GROUP + g)[:, None] * WIDTH + d[None, :], acc, mask=(g < GROUP)[:, None])
                tl.store(sums + (part + split) * (2 * GROUP) + g, most, mask=g < GROUP)
                tl.store(sums + (part + split) * (2 * GROUP) + GROUP + g, total, mask=g < GROUP)
        if splits > 1:
            tl.debug_barrier()
            done = tl.cdiv(splits - z, tl.num_programs(2))
            if tl.atomic_add(arrived + t * KV_HEADS + h, done, sem="acq_rel") + done == splits:
                tl.store(arrived + t * KV_HEADS + h, 0)
                _join(written, parts + part * GROUP * WIDTH, sums + part * (2 * GROUP), splits, GROUP, GROUP_ROWS, SIZE, WIDTH, JOINED)


@triton.jit
def _join(written, parts, sums, splits, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
          JOINED: tl.constexpr):
    """Put the parts of a row's heads together. parts [splits, GROUP, WIDTH], sums [splits, 2, GROUP]: largest score, sum of weights."""
    g = tl.arange(0, GROUP_ROWS)
    d = tl.arange(0, WIDTH)
    above = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    acc = tl.zeros((GROUP_ROWS, WIDTH), tl.float32)
    for start in tl.range(0, splits, JOINED, num_stages=1):
        s = start + tl.arange(0, JOINED)
        there = (s < splits)[:, None] & (g < GROUP)[None, :]
        at = s[:, None] * (2 * GROUP) + g[None, :]
        part = tl.load(parts + (s[:, None] * GROUP + g[None, :])[:, :, None] * WIDTH + d[None, None, :], mask=there[:, :, None], other=0.0,
                       cache_modifier=".cg")
        most = tl.load(sums + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        each = tl.load(sums + at + GROUP, mask=there, other=0.0, cache_modifier=".cg")
        level = tl.maximum(above, tl.max(most, 0))
        weight = tl.exp2(most - level[None, :])
        fade = tl.exp2(above - level)
        total = total * fade + tl.sum(each * weight, 0)
        acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        above = level
    tl.store(written + g[:, None] * SIZE + d[None, :], (acc / total[:, None]).to(written.dtype.element_ty),
             mask=(g < GROUP)[:, None] & (d < SIZE)[None, :])

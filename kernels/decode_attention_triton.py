"""The Triton form of `decode_attention`: one launch, each request's tokens shared out among programs, their parts joined in order.

A program takes stretches of one row's tokens for all query heads that share keys: they are the rows of its products. How many stretches
there are, and so what is added to what, follows from the row's own position and the model: its bits do not depend on the other rows, on
the longest request, on how many programs share the stretches, nor on where blocks lie. The program that ends last joins the parts, first
to last.

Where a row stands and where its tokens lie is looked up while the launch before, which makes `qkv`, still ends (early.py).
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .early import begin
from .triton_compat import tl, triton


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap)"""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return softcap - 2.0 * softcap / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / softcap)))


@triton.jit
def _turned(heads, there, cos, sin, norm, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr):
    """The heads that begin at the pointers `heads` [n, 1], normed and turned: [n, WIDTH] in their dtype, zeros where not `there` [n, 1]."""
    dtype = heads.dtype.element_ty
    d = tl.arange(0, WIDTH)[None, :]
    inside = d < SIZE
    x = tl.load(heads + d, mask=there & inside, other=0.0).to(tl.float32)
    if norm is not None:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = (x * rstd * tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    if ROTARY:
        turns = d < ROTARY
        across = tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2)
        y = tl.load(heads + across, mask=there & turns, other=0.0).to(tl.float32)
        if norm is not None:
            y = (y * rstd * tl.load(norm + across, mask=turns, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        x = x * tl.load(cos + d, mask=turns, other=1.0) + y * tl.load(sin + d, mask=turns, other=0.0)
    return x.to(dtype)


@triton.jit(do_not_specialize=["blocks", "table_width", "window", "stamp_index"])
def decode_attention_kernel(
    qkv, cache, out, positions, rope_rows, tables, cos, sin, q_norm, k_norm, parts, sums, arrived, stamps, stamp_index,
    blocks, table_width, window, scale, softcap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, STAMPED: tl.constexpr,
    QUERIES: tl.constexpr, GROUP_ROWS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    JOINED: tl.constexpr, AHEAD: tl.constexpr, LONG: tl.constexpr, EARLY: tl.constexpr,
):
    """QUERIES: rows of the products; GROUP_ROWS: the query heads of a key's head, as a power of two; SPLITS: most stretches of a row;
    LEAST: fewest tokens of one; LONG: tokens up to which there are half as many at most; TILE: tokens read at once; JOINED: parts read at
    once, AHEAD: so many times. Programs take neighbouring stretches."""
    t = tl.program_id(0)
    h = tl.program_id(1)
    z = tl.program_id(2)
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
    base = first // BLOCK * BLOCK
    stretch = tl.maximum(tl.cdiv(position - base, SPLITS), tl.minimum(tl.cdiv(2 * (position - base), SPLITS), 2 * LONG // SPLITS))
    stretch = tl.maximum(LEAST, tl.cdiv(stretch, TILE) * TILE)
    splits = tl.maximum(1, tl.cdiv(position - base, stretch))
    programs = tl.minimum(splits, tl.num_programs(2))
    split = z * splits // programs
    behind = (z + 1) * splits // programs
    start = base + split * stretch
    end = tl.minimum(position, base + behind * stretch)
    table = tables + t * table_width
    at = start + tl.arange(0, TILE)
    block = tl.load(table + at // BLOCK, mask=at < end, other=0)  # a tile ahead, lest reading waits for where to read
    here = tl.load(table + tl.maximum(position, 0) // BLOCK).to(tl.int64)
    begin(stamps + stamp_index if STAMPED else None, t + h + z, EARLY)
    if (position >= 0) & (z < programs):
        mine = behind - split
        g = tl.arange(0, QUERIES)
        d = tl.arange(0, WIDTH)
        inside = d < SIZE
        heads = (g < GROUP)[:, None]
        row = qkv + t.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * SIZE)
        keys = cache + h.to(tl.int64) * blocks * (BLOCK * SIZE)
        values = keys + KV_HEADS * blocks.to(tl.int64) * (BLOCK * SIZE)
        v_new = tl.load(row + (HEADS + KV_HEADS + h) * SIZE + d, mask=inside, other=0.0)[None, :]
        k_new = _turned(row + (HEADS + h + tl.zeros((1, 1), tl.int32)) * SIZE, True, cos, sin, k_norm, eps, SIZE, WIDTH, ROTARY)
        q = _turned(row + (h * GROUP + g)[:, None] * SIZE, heads, cos, sin, q_norm, eps, SIZE, WIDTH, ROTARY)
        if split == 0:
            cell = (here * BLOCK + position % BLOCK) * SIZE + d[None, :]
            tl.store(keys + cell, k_new, mask=inside[None, :])
            tl.store(values + cell, v_new, mask=inside[None, :])
        own = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1)
        to_exp2 = LOG2_E if SOFTCAP else scale * LOG2_E
        if SOFTCAP:  # which would hide a query that is not finite
            own = capped(own * scale, softcap) + tl.sum(q.to(tl.float32) * 0.0, 1)
        written = out + t.to(tl.int64) * (HEADS * SIZE) + h * (GROUP * SIZE)
        part = (t * KV_HEADS + h) * SPLITS
        most = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        if split == 0:  # takes the row's own token too
            most = own * to_exp2
            total += tl.exp2(most - most)  # 1, or NaN where the product is not finite
            acc += v_new.to(tl.float32)
        left = stretch
        for tile in tl.range(start, end, TILE, num_stages=STAGES):
            key = tile + tl.arange(0, TILE)
            there = key < end
            if WINDOWED:
                there &= key >= first
            place = block * (BLOCK * SIZE) + key % BLOCK * SIZE
            block = tl.load(table + (key + TILE) // BLOCK, mask=key + TILE < end, other=0)
            k = tl.load(keys + place[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee")
            if SOFTCAP:
                scores = capped(scores * scale, softcap)
            scores = tl.where(there[None, :], scores * to_exp2, float("-inf"))
            above = tl.maximum(most, tl.max(scores, 1))
            p = tl.exp2(scores - above[:, None])
            fade = tl.exp2(most - above)
            total = total * fade + tl.sum(p, 1)
            v = tl.load(values + place[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(p.to(dtype), v, acc * fade[:, None], input_precision="ieee")
            most = above
            left -= TILE
            if (left == 0) & (tile + TILE < end):
                _leave(parts, sums, part + split, most, total, acc, GROUP)
                split += 1
                left = stretch
                most = tl.full((QUERIES,), float("-inf"), tl.float32)
                total = tl.zeros((QUERIES,), tl.float32)
                acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        if splits == 1:
            tl.store(written + g[:, None] * SIZE + d[None, :], (acc / total[:, None]).to(dtype), mask=heads & inside[None, :])
        else:
            _leave(parts, sums, part + split, most, total, acc, GROUP)
            tl.debug_barrier()
            if tl.atomic_add(arrived + t * KV_HEADS + h, mine, sem="acq_rel") + mine == splits:
                tl.store(arrived + t * KV_HEADS + h, 0)
                parts += part * GROUP * WIDTH
                sums += part * (2 * GROUP)
                if splits > JOINED and AHEAD > 1:
                    _join(written, parts, sums, splits, GROUP, GROUP_ROWS, SIZE, WIDTH, JOINED, AHEAD)
                else:
                    _join(written, parts, sums, splits, GROUP, GROUP_ROWS, SIZE, WIDTH, JOINED, 1)


@triton.jit
def _leave(parts, sums, part, most, total, acc, GROUP: tl.constexpr):
    """Put a stretch's share where the last program finds it: acc [QUERIES, WIDTH], most and total [QUERIES]."""
    g = tl.arange(0, acc.shape[0])
    d = tl.arange(0, acc.shape[1])
    tl.store(parts + (part * GROUP + g)[:, None] * acc.shape[1] + d[None, :], acc, mask=(g < GROUP)[:, None])
    tl.store(sums + part * (2 * GROUP) + g, most, mask=g < GROUP)
    tl.store(sums + part * (2 * GROUP) + GROUP + g, total, mask=g < GROUP)


@triton.jit
def _join(written, parts, sums, splits, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
          JOINED: tl.constexpr, STAGES: tl.constexpr):
    """Put the parts of a row's heads together. parts [splits, GROUP, WIDTH], sums [splits, 2, GROUP]: largest score, sum of weights."""
    g = tl.arange(0, GROUP_ROWS)
    d = tl.arange(0, WIDTH)
    above = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    acc = tl.zeros((GROUP_ROWS, WIDTH), tl.float32)
    for start in tl.range(0, splits, JOINED, num_stages=STAGES):
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

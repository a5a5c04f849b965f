"""The Triton kernel of `prefill_attention`: a tile of rows of one request against a stretch of its tokens."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .decode_attention_triton import capped
from .triton_compat import tl, triton


@triton.jit(do_not_specialize=["blocks", "table_width", "window"], do_not_specialize_on_alignment=["pieces"])
def prefill_attention_kernel(
    q, cache, out, pieces, tables, parts, sums, arrived, blocks, table_width, row_stride, window, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):
    """The query heads that share keys stand under each other: QUERIES rows of the products are (row, head), the heads of a row together.

    pieces [pieces, 10] int32, see `Pieces`. Keys are taken TILE at once, from multiples of TILE on, so what is added to what follows from
    a row's position and its request's stretches alone.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dtype = q.dtype.element_ty
    h = tl.program_id(0)
    piece = pieces + tl.program_id(1) * 10
    row = tl.load(piece).to(tl.int64)
    rows = tl.load(piece + 1)
    position = tl.load(piece + 2)
    table = tables + tl.load(piece + 3) * table_width
    first = tl.load(piece + 4)
    end = tl.load(piece + 5)
    splits = tl.load(piece + 7)
    m = tl.arange(0, QUERIES)
    d = tl.arange(0, WIDTH)
    inside = d < SIZE
    real = m < rows * GROUP
    at = q + (row + m // GROUP)[:, None] * row_stride + (h * GROUP + m % GROUP)[:, None] * SIZE + d[None, :]
    queries = tl.load(at, mask=real[:, None] & inside[None, :], other=0.0)
    keys = cache + h.to(tl.int64) * blocks * (BLOCK * SIZE)
    values = keys + KV_HEADS * blocks.to(tl.int64) * (BLOCK * SIZE)
    to_exp2 = LOG2_E if SOFTCAP else scale * LOG2_E
    places = position + m // GROUP
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    # between `seen` and `hidden` every row sees every key
    seen = first
    if WINDOWED:
        seen = tl.minimum(tl.maximum(first, tl.cdiv(tl.maximum(0, position + rows - window), TILE) * TILE), end)
        most, total, acc = _attend(most, total, acc, queries, places, first, seen, end, table, keys, values, scale, to_exp2, softcap,
                                   window, SIZE, WIDTH, BLOCK, SOFTCAP, WINDOWED, TILE, STAGES, True)
    hidden = tl.maximum(seen, tl.minimum(end // TILE, (position + 1) // TILE) * TILE)
    most, total, acc = _attend(most, total, acc, queries, places, seen, hidden, end, table, keys, values, scale, to_exp2, softcap, window,
                               SIZE, WIDTH, BLOCK, SOFTCAP, WINDOWED, TILE, STAGES, False)
    most, total, acc = _attend(most, total, acc, queries, places, hidden, end, end, table, keys, values, scale, to_exp2, softcap, window,
                               SIZE, WIDTH, BLOCK, SOFTCAP, WINDOWED, TILE, STAGES, True)
    if SOFTCAP:
        acc += queries.to(tl.float32) * 0.0  # the cap would hide a query that is not finite
    written = out + (row + m // GROUP)[:, None] * (HEADS * SIZE) + (h * GROUP + m % GROUP)[:, None] * SIZE + d[None, :]
    if splits == 1:
        tl.store(written, (acc / total[:, None]).to(dtype), mask=real[:, None] & inside[None, :])
    else:
        split = tl.load(piece + 6)
        counter = arrived + tl.load(piece + 9) * KV_HEADS + h
        part = tl.load(piece + 8).to(tl.int64) * KV_HEADS + h * splits * rows * GROUP
        mine = part + split * rows * GROUP + m
        tl.store(parts + mine[:, None] * WIDTH + d[None, :], acc, mask=real[:, None])
        tl.store(sums + mine * 2, most, mask=real)
        tl.store(sums + mine * 2 + 1, total, mask=real)
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            tl.store(counter, 0)
            _join(written, real, parts, sums, part, splits, rows * GROUP, SIZE, WIDTH, QUERIES)


@triton.jit
def _attend(most, total, acc, queries, places, first, last, end, table, keys, values, scale, to_exp2, softcap, window,
            SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
            TILE: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr):
    """Take the keys from `first` up to `last` in: all of them seen by all rows, or (MASKED) by each those that it may see before `end`."""
    d = tl.arange(0, WIDTH)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        key = start + tl.arange(0, TILE)
        if MASKED:
            block = tl.load(table + key // BLOCK, mask=key < end, other=0)
        else:
            block = tl.load(table + key // BLOCK)
        cell = block * (BLOCK * SIZE) + key % BLOCK * SIZE
        if MASKED or WIDTH > SIZE:
            there = (key < end)[:, None] & (d < SIZE)[None, :]
            k = tl.load(keys + cell[:, None] + d[None, :], mask=there, other=0.0)
            v = tl.load(values + cell[:, None] + d[None, :], mask=there, other=0.0)
        else:
            k = tl.load(keys + cell[:, None] + d[None, :])
            v = tl.load(values + cell[:, None] + d[None, :])
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            scores = capped(scores * scale, softcap)
        if MASKED:
            sees = key[None, :] <= places[:, None]
            if WINDOWED:
                sees &= key[None, :] > places[:, None] - window
            scores = tl.where(sees, scores, float("-inf"))
        above = tl.maximum(most, tl.max(scores, 1) * to_exp2)
        level = tl.where(above == float("-inf"), 0.0, above)
        p = tl.exp2(scores * to_exp2 - level[:, None])
        fade = tl.exp2(most - level)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        most = above
    return most, total, acc


@triton.jit
def _join(written, real, parts, sums, part, splits, rows, SIZE: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr):
    """Put the parts of a tile together, first to last."""
    m = tl.arange(0, QUERIES)
    d = tl.arange(0, WIDTH)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    for split in range(0, splits):
        at = part + split * rows + m
        most = tl.maximum(most, tl.load(sums + at * 2, mask=real, other=0.0, cache_modifier=".cg"))
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    for split in range(0, splits):
        at = part + split * rows + m
        weight = tl.exp2(tl.load(sums + at * 2, mask=real, other=0.0, cache_modifier=".cg") - most)
        total += tl.load(sums + at * 2 + 1, mask=real, other=0.0, cache_modifier=".cg") * weight
        acc += tl.load(parts + at[:, None] * WIDTH + d[None, :], mask=real[:, None], other=0.0, cache_modifier=".cg") * weight[:, None]
    tl.store(written, (acc / total[:, None]).to(written.dtype.element_ty), mask=real[:, None] & (d < SIZE)[None, :])

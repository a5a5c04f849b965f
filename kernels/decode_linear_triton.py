"""`decode_linear` as one kernel.

The first programs of the grid make what does not need the base product: 1 / rms of the rows and the rank rows' share of the result
(rank_programs.py). The others multiply x by their rows of the matrix, and late in that loop, while the last reads are still under way, take
what those have made; who comes too early waits after it. Where a program has few outputs, its warps are `LANES` that split the inputs, so
that the chain of products of each is short.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .early import begin, let_next_begin, prefetch
from .rank_programs import first_programs, outputs_of_rank, place_of, row_sums
from .triton_compat import tl, triton


@triton.jit
def gated(gate, up, GLU: tl.constexpr):
    """act(gate) * up in fp32."""
    if GLU == "silu":
        return gate / (1 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * (1 - 1 / (1 + tl.exp(2 * inner))) * up


@triton.jit
def taken(inverses, added, m, n, end, second, rows, ADDED: tl.constexpr, NORM: tl.constexpr, GLU: tl.constexpr):
    """What the first programs have made for rows m and outputs n, of the gate and of the up half: 1 / rms and the rank rows' share."""
    BM: tl.constexpr = m.shape[0]
    BN: tl.constexpr = n.shape[0]
    inverse = tl.zeros((BM,), tl.float32) + 1
    more = tl.zeros((BM, BN), tl.float32)
    more_up = more
    if NORM:
        inverse = tl.load(inverses + m, mask=m < rows, other=1.0, cache_modifier=".cg")
    if ADDED:
        inside = (n < end)[None, :] & (m < rows)[:, None]
        place = added + m[:, None] * second + n[None, :]
        more = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
        if GLU != "":
            more_up = tl.load(place + second // 2, mask=inside, other=0.0, cache_modifier=".cg")
    return inverse, more, more_up


@triton.jit(do_not_specialize=["rows", "parts_row", "weights_row"], do_not_specialize_on_alignment=["counters", "stamp"])
def linear_kernel(
    x, weight, bias, out, parts, stream, next_weight, parts_out, a, b, pages, row_weights, h, partials, added, inverses, counters, stamp,
    rows, x_row, out_row, parts_row, weights_row, a_page, b_page, width, eps, scale,
    D_IN: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, SLICES: tl.constexpr, GLU: tl.constexpr,
    BM: tl.constexpr, ROW_TILES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
    PARTS: tl.constexpr, PARTS_OUT: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr,
    PROGRAMS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr, EN: tl.constexpr, CHUNK: tl.constexpr, MEET: tl.constexpr,
    MAX_PAGES: tl.constexpr, ASSEMBLY: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):
    """Slices end at E0, E1, E2, the gate at E0; `PROGRAMS` programs for rank rows, then one for 1 / rms, then `TILES` * `ROW_TILES`."""
    NORM: tl.constexpr = parts is not None
    RANK: tl.constexpr = a is not None
    FIRST: tl.constexpr = PROGRAMS + (1 if NORM else 0)
    program = tl.program_id(0)
    if program < FIRST:
        first_programs(
            program, x, a, b, pages, row_weights, h, partials, added, parts, inverses, counters, stamp, rows, x_row, parts_row,
            weights_row, a_page, b_page, width, eps, D_IN, E0, E1, E2, SLICES, BM, ROW_TILES, PARTS, DEPTH, STEP, PROGRAMS, EN, CHUNK,
            MAX_PAGES, ASSEMBLY, EARLY)
    else:
        tile = (program - FIRST) // ROW_TILES
        m = (program - FIRST) % ROW_TILES * BM + tl.arange(0, BM)
        if GLU != "":
            first, end = tile * BN, E0
        else:
            _, first, end = place_of(tile, E0, E1, E2, BN)
        n = first + tl.arange(0, BN)
        here = (m < rows)[:, None]
        inside = n < end
        both = here & inside[None, :]
        at = m[:, None] * out_row + n[None, :]
        if RANK:
            count = tl.load(pages)
        if EARLY:
            line = tl.minimum(tl.arange(0, AHEAD) * (1024 // weight.dtype.element_ty.primitive_bitwidth), D_IN - 1)
            ahead = weight + tl.minimum(n, end - 1).to(tl.int64)[:, None] * D_IN + line[None, :]
            prefetch(ahead)
            if GLU != "":
                prefetch(ahead + E0 * D_IN)
        begin(stamp, program, EARLY)
        if stream is not None:
            before = tl.load(stream + at, mask=both, other=0.0)
            following = tl.load(next_weight + n, mask=inside, other=0.0)
        wanted = 1 if NORM else 0
        reach = end
        if RANK:
            wanted += tl.where(count > 0, outputs_of_rank(E0, E1, E2, EN) * ROW_TILES, 0)
            reach = tl.where(count > 0, end, 0)
        ready = 0
        inverse = tl.zeros((BM,), tl.float32) + 1
        more = tl.zeros((BM, BN), tl.float32)
        more_up = more
        if LANES == 1:
            ds = tl.arange(0, BK)
            ws = weight + n.to(tl.int64)[None, :] * D_IN + ds[:, None]
            xs = x + m[:, None] * x_row + ds[None, :]
            sums = tl.zeros((BM, BN), tl.float32)
        else:
            ds = tl.arange(0, LANES)[:, None] * (BK // LANES) + tl.arange(0, BK // LANES)[None, :]
            ws = weight + n.to(tl.int64)[None, None, :] * D_IN + ds[:, :, None]
            xs = x + m[None, :, None] * x_row + ds[:, None, :]
            sums = tl.zeros((LANES, BM, BN), tl.float32)
        sums_up = sums
        for step in tl.range(0, (D_IN + BK - 1) // BK, num_stages=STAGES):
            k = step * BK
            rest = ds < (D_IN - k if D_IN % BK != 0 else BK)
            if LANES == 1:
                known = inside[None, :] & rest[:, None]
                xk = tl.load(xs + k, mask=here & rest[None, :], other=0.0)
            else:
                known = inside[None, None, :] & rest[:, :, None]
                xk = tl.load(xs + k, mask=here[None] & rest[:, None, :], other=0.0)
            wk = tl.load(ws + k, mask=known, other=0.0, eviction_policy="evict_first")
            sums = tl.dot(xk, wk, sums, input_precision="ieee")
            if GLU != "":
                wk = tl.load(ws + (E0 * D_IN + k), mask=known, other=0.0, eviction_policy="evict_first")
                sums_up = tl.dot(xk, wk, sums_up, input_precision="ieee")
            if RANK or NORM:
                if step == MEET:
                    ready = tl.atomic_add(counters + 1, 0, sem="acquire")
                    if ready >= wanted:
                        inverse, more, more_up = taken(inverses, added, m, n, reach, E2, rows, RANK, NORM, GLU)
        let_next_begin(EARLY)
        if RANK or NORM:
            if ready < wanted:
                while ready < wanted:
                    ready = tl.atomic_add(counters + 1, 0, sem="acquire")
                inverse, more, more_up = taken(inverses, added, m, n, reach, E2, rows, RANK, NORM, GLU)
        y = ((sums if LANES == 1 else tl.sum(sums, 0)) + more) * inverse[:, None]
        if bias is not None:
            y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GLU != "":
            up = ((sums_up if LANES == 1 else tl.sum(sums_up, 0)) + more_up) * inverse[:, None]
            if bias is not None:
                up += tl.load(bias + E0 + n, mask=inside, other=0.0).to(tl.float32)[None, :]
            y = gated(y, up, GLU)
        if stream is not None:
            y = before.to(tl.float32) + scale * y
            tl.store(stream + at, y.to(stream.dtype.element_ty), mask=both)
            for part in tl.static_range(0, PARTS_OUT, TILES):
                square = row_sums(y * y, BN, LEVELS) if part == 0 else tl.zeros((BM,), tl.float32)
                if part + tile < PARTS_OUT:
                    tl.store(parts_out + (part + tile) * parts_row + m, square, mask=m < rows)
            y *= following.to(tl.float32)[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=both)

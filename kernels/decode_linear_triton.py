"""`decode_linear` as one kernel: the base product, and beside it the rank rows.

The first programs of the grid compute H = weights * (x A^T), cut along the inputs; whoever is the last to finish a tile of H adds its
parts in their order. The other programs multiply x by their rows of the matrix. Late in that loop, while the last reads are still under
way, they take H, which is there by then, and add H B^T in sums of its own. A rank program waits for nobody and a grid starts in order, so
a program that waits for H gets it.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .triton_compat import tl, triton


@triton.jit
def rank_tasks(
    program, x, a, pages, row_weights, h, partials, counters, rows, x_row, a_page, weights_row,
    D_IN: tl.constexpr, SLICES: tl.constexpr, BM: tl.constexpr, ROW_TILES: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr,
    PAGES: tl.constexpr, PROGRAMS: tl.constexpr, MAX_PAGES: tl.constexpr,
):
    """H of all active pages: h [slices, ROW_TILES * BM, MAX_PAGES * 16] in the dtype of x; a [pages, .., slices, 16, D_IN].

    A task is `PAGES` pages of a slice for `BM` rows over `DEPTH` inputs. counters[0] counts the tiles of H that are done,
    counters[1 + tile] the parts of each.
    """
    SPLITS: tl.constexpr = (D_IN + DEPTH - 1) // DEPTH
    LANES: tl.constexpr = 4
    N: tl.constexpr = PAGES * 16
    count = tl.load(pages)
    groups = (count + PAGES - 1) // PAGES
    c = tl.arange(0, N)
    lane = tl.arange(0, LANES)[:, None]
    for task in range(program, ROW_TILES * SLICES * groups * SPLITS, PROGRAMS):
        part = task % SPLITS
        tile = task // SPLITS
        s = tile % SLICES
        m = tile // SLICES % ROW_TILES * BM + tl.arange(0, BM)
        here = (m < rows)[:, None]
        group = tile // SLICES // ROW_TILES
        place = group * PAGES + c // 16
        acts = place < count
        page = tl.load(pages + 1 + place, mask=acts, other=0).to(tl.int64)
        column = tl.load(pages + 1 + MAX_PAGES + place, mask=acts, other=0)
        weight = tl.load(row_weights + m[:, None] * weights_row + column[None, :], mask=here & acts[None, :], other=0.0)
        first = page * a_page + (s * 16 + c % 16) * D_IN
        sums = tl.zeros((LANES, BM, N), tl.float32)
        for k in tl.range(0, DEPTH, STEP, num_stages=4):
            d = part * DEPTH + k + lane * (STEP // LANES) + tl.arange(0, STEP // LANES)[None, :]
            known = d < (D_IN if D_IN % DEPTH != 0 or DEPTH % STEP != 0 else 1 << 30)
            rank = tl.load(a + first[None, None, :] + d[:, :, None], mask=known[:, :, None] & acts[None, None, :], other=0.0)
            xs = tl.load(x + m[None, :, None] * x_row + d[:, None, :], mask=here[None] & known[:, None, :], other=0.0)
            sums = tl.dot(xs, rank, sums, input_precision="ieee")
        sums = tl.sum(sums, 0)
        into = h + (s * (ROW_TILES * BM) + m[:, None]) * (MAX_PAGES * 16) + group * N + c[None, :]
        if SPLITS == 1:
            tl.store(into, (sums * weight).to(h.dtype.element_ty))
            tl.debug_barrier()
            tl.atomic_add(counters, 1, sem="release")
        else:
            parts = partials + (tile * SPLITS * BM + tl.arange(0, BM)[:, None]) * N + c[None, :]
            tl.store(parts + part * (BM * N), sums)
            tl.debug_barrier()
            if tl.atomic_add(counters + 1 + tile, 1, sem="acq_rel") == SPLITS - 1:
                sums = tl.load(parts, cache_modifier=".cg")
                for other in tl.static_range(1, SPLITS):
                    sums += tl.load(parts + other * (BM * N), cache_modifier=".cg")
                tl.store(into, (sums * weight).to(h.dtype.element_ty))
                tl.debug_barrier()
                tl.atomic_add(counters, 1, sem="release")


@triton.jit
def tiles_of_h(count, SLICES: tl.constexpr, ROW_TILES: tl.constexpr, PAGES: tl.constexpr):
    return ROW_TILES * SLICES * ((count + PAGES - 1) // PAGES)


@triton.jit
def rank_ready(counters, count, SLICES: tl.constexpr, ROW_TILES: tl.constexpr, PAGES: tl.constexpr):
    """Return when all of H is there."""
    wanted = tiles_of_h(count, SLICES, ROW_TILES, PAGES)
    done = tl.atomic_add(counters, 0, sem="acquire")
    while done < wanted:
        done = tl.atomic_add(counters, 0, sem="acquire")


@triton.jit
def load_up(b, pages, count, chunk, n, inside, b_page, CHUNK: tl.constexpr):
    """B^T [CHUNK, BN] of a chunk of the active rank rows at outputs n; b [pages, .., d_out, 16]."""
    r = chunk * CHUNK + tl.arange(0, CHUNK)
    acts = r // 16 < count
    page = tl.load(pages + 1 + r // 16, mask=acts, other=0).to(tl.int64)
    first = tl.max_contiguous(tl.multiple_of(page * b_page + r % 16, 16), 16)
    return tl.load(b + first[:, None] + n[None, :] * 16, mask=acts[:, None] & inside[None, :], other=0.0)


@triton.jit
def add_chunk(sums, h, up, count, chunk, m, s, ROWS: tl.constexpr, CHUNK: tl.constexpr, MAX_PAGES: tl.constexpr):
    """sums [BM, BN] + H B^T of a chunk. A page is one step of the tensor cores, so others add exact zeros."""
    r = chunk * CHUNK + tl.arange(0, CHUNK)
    place = h + (s * ROWS + m[:, None]) * (MAX_PAGES * 16) + r[None, :]
    return tl.dot(tl.load(place, mask=(r // 16 < count)[None, :], other=0.0, cache_modifier=".cg"), up, sums, input_precision="ieee")


@triton.jit
def row_sums(x, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of the rows of x [BM, WIDTH = 2^LEVELS], neighbours first: the order does not depend on BM, as that of `tl.sum` may."""
    BM: tl.constexpr = x.shape[0]
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (BM, WIDTH >> level + 1, 2)), 2)
    return tl.reshape(x, (BM,))


@triton.jit
def inverse_rms(parts, rows, m, parts_row, width, eps, BM: tl.constexpr, PARTS: tl.constexpr):
    """1 / rms of rows m, from sums of squares [PARTS, rows] that are added in one order, whatever BM."""
    part = tl.arange(0, 32)
    total = tl.zeros((BM, 32), tl.float32)
    for first in tl.static_range(0, PARTS, 32):
        known = (m < rows)[:, None] & (first + part < PARTS)[None, :]
        total += tl.load(parts + (first + part)[None, :] * parts_row + m[:, None], mask=known, other=0.0)
    return tl.rsqrt(row_sums(total, 32, 5) / width + eps)


@triton.jit
def gated(gate, up, GLU: tl.constexpr):
    """act(gate) * up in fp32."""
    if GLU == "silu":
        return gate / (1 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * (1 - 1 / (1 + tl.exp(2 * inner))) * up


@triton.jit
def place_of(tile, E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BN: tl.constexpr):
    """The slice of an output tile, its first output and where the slice ends: no tile lies in two slices."""
    T0: tl.constexpr = (E0 + BN - 1) // BN
    T1: tl.constexpr = T0 + (E1 - E0 + BN - 1) // BN
    s = (tile >= T0).to(tl.int32) + (tile >= T1).to(tl.int32)
    start = tl.where(s == 0, 0, tl.where(s == 1, E0, E1))
    end = tl.where(s == 0, E0, tl.where(s == 1, E1, E2))
    return s, start + (tile - tl.where(s == 0, 0, tl.where(s == 1, T0, T1))) * BN, end


@triton.jit(do_not_specialize=["rows", "parts_row", "weights_row"], do_not_specialize_on_alignment=["counters", "stamp"])
def linear_kernel(
    x, weight, bias, out, parts, stream, next_weight, parts_out, a, b, pages, row_weights, h, partials, counters, stamp,
    rows, x_row, out_row, parts_row, weights_row, a_page, b_page, width, eps, scale,
    D_IN: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, SLICES: tl.constexpr, GLU: tl.constexpr,
    BM: tl.constexpr, ROW_TILES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
    PARTS: tl.constexpr, PARTS_OUT: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr, PAGES: tl.constexpr,
    PROGRAMS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, MEET: tl.constexpr, MAX_PAGES: tl.constexpr,
):
    program = tl.program_id(0)
    if stamp is not None:
        if program == 0:
            tl.store(stamp, tl.extra.cuda.globaltimer())
    if program < PROGRAMS:
        if a is not None:
            rank_tasks(program, x, a, pages, row_weights, h, partials, counters, rows, x_row, a_page, weights_row,
                       D_IN, SLICES, BM, ROW_TILES, DEPTH, STEP, PAGES, PROGRAMS, MAX_PAGES)
    else:
        tile = (program - PROGRAMS) // ROW_TILES
        m = (program - PROGRAMS) % ROW_TILES * BM + tl.arange(0, BM)
        here = (m < rows)[:, None]
        if GLU != "":
            s, first, end = 0, tile * BN, E0
        else:
            s, first, end = place_of(tile, E0, E1, E2, BN)
        n = first + tl.arange(0, BN)
        inside = n < end
        both = here & inside[None, :]
        ds = tl.arange(0, LANES)[:, None] * (BK // LANES) + tl.arange(0, BK // LANES)[None, :]
        w = weight + n.to(tl.int64)[None, None, :] * D_IN + ds[:, :, None]
        xs = x + m[None, :, None] * x_row + ds[:, None, :]
        sums = tl.zeros((LANES, BM, BN), tl.float32)
        sums_up = tl.zeros((LANES, BM, BN), tl.float32)
        added = tl.zeros((BM, BN), tl.float32)
        added_up = tl.zeros((BM, BN), tl.float32)
        inverse = tl.zeros((BM,), tl.float32) + 1
        at = m[:, None] * out_row + n[None, :]
        if stream is not None:
            before = tl.load(stream + at, mask=both, other=0.0)
            following = tl.load(next_weight + n, mask=inside, other=0.0)
        chunk = 0
        chunks = 0
        ready = 0
        wanted = 0
        count = 0
        if a is not None:
            count = tl.load(pages)
            chunks = (count * 16 + CHUNK - 1) // CHUNK
            wanted = tiles_of_h(count, SLICES, ROW_TILES, PAGES)
        meet = tl.maximum(MEET - chunks, 0) if a is not None else 0
        up = tl.zeros((CHUNK, BN), x.dtype.element_ty)
        up_up = up
        for step in tl.range(0, (D_IN + BK - 1) // BK, num_stages=STAGES):
            k = step * BK
            rest = ds < (D_IN - k if D_IN % BK != 0 else BK)
            known = inside[None, None, :] & rest[:, :, None]
            xk = tl.load(xs + k, mask=here[None] & rest[:, None, :], other=0.0)
            sums = tl.dot(xk, tl.load(w + k, mask=known, other=0.0, eviction_policy="evict_first"), sums, input_precision="ieee")
            if GLU != "":
                wk = tl.load(w + (E0 * D_IN + k), mask=known, other=0.0, eviction_policy="evict_first")
                sums_up = tl.dot(xk, wk, sums_up, input_precision="ieee")
            if parts is not None:
                if step == MEET:
                    inverse = inverse_rms(parts, rows, m, parts_row, width, eps, BM, PARTS)
            if a is not None:
                if (step >= meet) & (chunk < chunks):
                    if step == meet:
                        up = load_up(b, pages, count, 0, n, inside, b_page, CHUNK)
                        if GLU != "":
                            up_up = load_up(b, pages, count, 0, n + E0, inside, b_page, CHUNK)
                    else:
                        if ready < wanted:
                            ready = tl.atomic_add(counters, 0, sem="acquire")
                        if ready >= wanted:
                            added = add_chunk(added, h, up, count, chunk, m, s, ROW_TILES * BM, CHUNK, MAX_PAGES)
                            if GLU != "":
                                added_up = add_chunk(added_up, h, up_up, count, chunk, m, SLICES - 1, ROW_TILES * BM, CHUNK, MAX_PAGES)
                            chunk += 1
                            up = load_up(b, pages, count, chunk, n, inside, b_page, CHUNK)
                            if GLU != "":
                                up_up = load_up(b, pages, count, chunk, n + E0, inside, b_page, CHUNK)
        if a is not None:
            if ready < wanted:
                rank_ready(counters, count, SLICES, ROW_TILES, PAGES)
            for last in tl.range(chunk, chunks, num_stages=1):
                up = load_up(b, pages, count, last, n, inside, b_page, CHUNK)
                added = add_chunk(added, h, up, count, last, m, s, ROW_TILES * BM, CHUNK, MAX_PAGES)
                if GLU != "":
                    up_up = load_up(b, pages, count, last, n + E0, inside, b_page, CHUNK)
                    added_up = add_chunk(added_up, h, up_up, count, last, m, SLICES - 1, ROW_TILES * BM, CHUNK, MAX_PAGES)
        y = (tl.sum(sums, 0) + added) * inverse[:, None]
        if bias is not None:
            y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GLU != "":
            up = (tl.sum(sums_up, 0) + added_up) * inverse[:, None]
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

"""What stands ready for the sums of a linear when its base product is done: the rank rows' share and 1 / rms, made beside it.

A grid starts in order, and its first programs are these: they compute H = weights * (x A^T), wait for each other, which they can, for all
of them run at once, and add up H B^T. counters[0] counts the tiles of H that are done, counters[1] what is done of all that the base
product waits for, counters[2 + tile] the parts of a tile of H.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .early import begin, prefetch
from .triton_compat import tl, triton


@triton.jit
def rank_tasks(
    program, x, a, pages, row_weights, h, partials, counters, stamp, rows, x_row, a_page, weights_row,
    D_IN: tl.constexpr, SLICES: tl.constexpr, BM: tl.constexpr, ROW_TILES: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr,
    PROGRAMS: tl.constexpr, MAX_PAGES: tl.constexpr, EARLY: tl.constexpr,
):
    """H of all active pages: h [slices, ROW_TILES * BM, MAX_PAGES * 16] in the dtype of x; a [pages, .., slices, 16, D_IN].

    A task is a page of a slice for `BM` rows over `DEPTH` inputs, `STEP` of them at a time.
    """
    SPLITS: tl.constexpr = (D_IN + DEPTH - 1) // DEPTH
    LANES: tl.constexpr = 4
    r = tl.arange(0, 16)
    lane = tl.arange(0, LANES)[:, None]
    count = tl.load(pages)
    place = tl.minimum(program // SPLITS // SLICES // ROW_TILES, MAX_PAGES - 1)
    page = tl.load(pages + 1 + place).to(tl.int64)
    column = tl.load(pages + 1 + MAX_PAGES + place)
    if EARLY:
        if place < count:
            LINE: tl.constexpr = 1024 // a.dtype.element_ty.primitive_bitwidth
            line = tl.arange(0, triton.next_power_of_2((DEPTH + LINE - 1) // LINE)) * LINE
            d = tl.minimum(program % SPLITS * DEPTH + line, D_IN - 1)
            prefetch(a + page * a_page + (program // SPLITS % SLICES * 16 + r)[:, None] * D_IN + d[None, :])
    begin(stamp, program, EARLY)
    for task in range(program, ROW_TILES * SLICES * count * SPLITS, PROGRAMS):
        part = task % SPLITS
        tile = task // SPLITS
        s = tile % SLICES
        m = tile // SLICES % ROW_TILES * BM + tl.arange(0, BM)
        here = m < rows
        place = tile // SLICES // ROW_TILES
        if task != program:
            page = tl.load(pages + 1 + place).to(tl.int64)
            column = tl.load(pages + 1 + MAX_PAGES + place)
        weight = tl.load(row_weights + m * weights_row + column, mask=here, other=0.0)[:, None]
        first = page * a_page + (s * 16 + r) * D_IN
        sums = tl.zeros((LANES, BM, 16), tl.float32)
        for k in tl.range(0, DEPTH, STEP, num_stages=5):
            d = part * DEPTH + k + lane * (STEP // LANES) + tl.arange(0, STEP // LANES)[None, :]
            known = d < (D_IN if D_IN % DEPTH != 0 or DEPTH % STEP != 0 else 1 << 30)
            rank = tl.load(a + first[None, None, :] + d[:, :, None], mask=known[:, :, None], other=0.0)
            xs = tl.load(x + m[None, :, None] * x_row + d[:, None, :], mask=here[None, :, None] & known[:, None, :], other=0.0)
            sums = tl.dot(xs, rank, sums, input_precision="ieee")
        sums = tl.sum(sums, 0)
        into = h + (s * (ROW_TILES * BM) + m[:, None]) * (MAX_PAGES * 16) + place * 16 + r[None, :]
        if SPLITS == 1:
            tl.store(into, (sums * weight).to(h.dtype.element_ty))
            tl.debug_barrier()
            tl.atomic_add(counters, 1, sem="release")
        else:
            parts = partials + (tile * SPLITS * BM + tl.arange(0, BM)[:, None]) * 16 + r[None, :]
            tl.store(parts + part * (BM * 16), sums)
            tl.debug_barrier()
            if tl.atomic_add(counters + 2 + tile, 1, sem="acq_rel") == SPLITS - 1:
                sums = tl.load(parts, cache_modifier=".cg")
                for other in tl.static_range(1, SPLITS):
                    sums += tl.load(parts + other * (BM * 16), cache_modifier=".cg")
                tl.store(into, (sums * weight).to(h.dtype.element_ty))
                tl.debug_barrier()
                tl.atomic_add(counters, 1, sem="release")


@triton.jit
def rank_ready(counters, wanted, ASSEMBLY: tl.constexpr):
    """Return when `wanted` tiles of H are there."""
    if ASSEMBLY:
        while _seen(counters, False) < wanted:
            pass
        _seen(counters, True)
    else:
        while tl.atomic_add(counters, 0, sem="acquire") < wanted:
            pass


@triton.jit
def _seen(counter, ACQUIRE: tl.constexpr):
    """A number that others count up; with `ACQUIRE` what they have written before is there for the thread that sees it. That empties the
    multiprocessor's cache, so nobody waits by it."""
    return tl.inline_asm_elementwise(f"ld.{'acquire' if ACQUIRE else 'relaxed'}.gpu.global.s32 $0, [$1];", "=r,l", [counter.to(tl.int64)],
                                     dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def place_of(tile, E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BN: tl.constexpr):
    """The slice of an output tile, its first output and where the slice ends: no tile lies in two slices."""
    T0: tl.constexpr = (E0 + BN - 1) // BN
    T1: tl.constexpr = T0 + (E1 - E0 + BN - 1) // BN
    s = tl.where(tile >= T0, 1, 0) + tl.where(tile >= T1, 1, 0)
    start = tl.where(s == 0, 0, tl.where(s == 1, E0, E1))
    end = tl.where(s == 0, E0, tl.where(s == 1, E1, E2))
    return s, start + (tile - tl.where(s == 0, 0, tl.where(s == 1, T0, T1))) * BN, end


@triton.jit
def outputs_of_rank(E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, EN: tl.constexpr):
    """How many tiles of `EN` outputs there are."""
    return (E0 + EN - 1) // EN + (E1 - E0 + EN - 1) // EN + (E2 - E1 + EN - 1) // EN


@triton.jit
def rank_columns(b, pages, count, k, n, inside, b_page, CHUNK: tl.constexpr):
    """B^T [CHUNK, EN] of the active rank rows from k on, at outputs n; b [pages, .., E2, 16]."""
    r = k + tl.arange(0, CHUNK)
    acts = r // 16 < count
    page = tl.load(pages + 1 + r // 16, mask=acts, other=0).to(tl.int64)
    first = tl.max_contiguous(tl.multiple_of(page * b_page + r % 16, 16), 16)
    return tl.load(b + first[:, None] + n[None, :] * 16, mask=acts[:, None] & inside[None, :], other=0.0)


@triton.jit
def rank_rows(place, count, k, CHUNK: tl.constexpr):
    """H [BM, CHUNK] of the active rank rows from k on."""
    r = k + tl.arange(0, CHUNK)
    return tl.load(place + r[None, :], mask=(r // 16 < count)[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def rank_outputs(
    program, added, h, b, pages, counters, b_page,
    E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, SLICES: tl.constexpr, BM: tl.constexpr, ROW_TILES: tl.constexpr, EN: tl.constexpr,
    PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, MAX_PAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):
    """added [ROW_TILES * BM, E2] fp32 = H B^T. A page is one step of the tensor cores, so others add exact zeros."""
    count = tl.load(pages)
    tasks = tl.where(count > 0, outputs_of_rank(E0, E1, E2, EN) * ROW_TILES, 0)
    for task in range(program, tasks, PROGRAMS):
        s, first, end = place_of(task // ROW_TILES, E0, E1, E2, EN)
        m = task % ROW_TILES * BM + tl.arange(0, BM)
        n = first + tl.arange(0, EN)
        inside = n < end
        place = h + (tl.minimum(s, SLICES - 1) * (ROW_TILES * BM) + m[:, None]) * (MAX_PAGES * 16)
        up = rank_columns(b, pages, count, 0, n, inside, b_page, CHUNK)
        if task == program:
            rank_ready(counters, ROW_TILES * SLICES * count, ASSEMBLY)
        sums = tl.dot(rank_rows(place, count, 0, CHUNK), up, tl.zeros((BM, EN), tl.float32), input_precision="ieee")
        for k in tl.range(CHUNK, count * 16, CHUNK, num_stages=3):
            up = rank_columns(b, pages, count, k, n, inside, b_page, CHUNK)
            sums = tl.dot(rank_rows(place, count, k, CHUNK), up, sums, input_precision="ieee")
        tl.store(added + m[:, None] * E2 + n[None, :], sums, mask=inside[None, :])
        tl.debug_barrier()
        tl.atomic_add(counters + 1, 1, sem="release")


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
def first_programs(
    program, x, a, b, pages, row_weights, h, partials, added, parts, inverses, counters, stamp, rows, x_row, parts_row, weights_row, a_page,
    b_page, width, eps, D_IN: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, SLICES: tl.constexpr, BM: tl.constexpr,
    ROW_TILES: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr, PROGRAMS: tl.constexpr, EN: tl.constexpr,
    CHUNK: tl.constexpr, MAX_PAGES: tl.constexpr, ASSEMBLY: tl.constexpr, EARLY: tl.constexpr,
):
    """`added` by the first `PROGRAMS` programs, where there is `a`; `inverses` (1 / rms) by the next one, where there are `parts`."""
    if program < PROGRAMS:
        if a is not None:
            rank_tasks(program, x, a, pages, row_weights, h, partials, counters, stamp, rows, x_row, a_page, weights_row,
                       D_IN, SLICES, BM, ROW_TILES, DEPTH, STEP, PROGRAMS, MAX_PAGES, EARLY)
            rank_outputs(program, added, h, b, pages, counters, b_page,
                         E0, E1, E2, SLICES, BM, ROW_TILES, EN, PROGRAMS, CHUNK, MAX_PAGES, ASSEMBLY)
    elif parts is not None:
        begin(stamp, program, EARLY)
        for tile in tl.static_range(ROW_TILES):
            m = tile * BM + tl.arange(0, BM)
            tl.store(inverses + m, inverse_rms(parts, rows, m, parts_row, width, eps, BM, PARTS), mask=m < rows)
        tl.debug_barrier()
        tl.atomic_add(counters + 1, 1, sem="release")

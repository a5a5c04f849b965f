"""`decode_linear` over repacked rows: a step reads the packed bytes of the matrix and nothing else of it.

y^T = W x^T. The codes are the left operand of the tensor cores, as exact integers; each piece of a row that has one scale is a product of
its own, which its scale multiplies in fp32, so that no number of the matrix is rounded. The base of the codes and the zero of their type
are taken off by a product of x with a constant; that product is a sum of x over the piece too, which the minima multiply. Programs that
share the inputs of a tile put their sums down; the last to arrive adds them in their order, and what the first programs of the grid have
made of rank rows beside them (rank_programs.py).
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .decode_linear_triton import gated
from .early import begin, let_next_begin, prefetch
from .handover import gathered, put
from .rank_programs import rank_ready, rank_tasks, row_sums
from .triton_compat import tl, triton
from .unpack_codes import codes, constant, field_addresses, half, scale_words, signed_bytes, small_number

CLASSES = constant(4)
"""Pieces that follow each other belong to different classes, which are summed for themselves: in steps of few rows they have columns of
their own in one product, in others products of their own, and the sums are the same bit for bit."""


@triton.jit
def _inputs(x, k, t, known, x_row, K: tl.constexpr, PADS: tl.constexpr):
    """x^T [k, column] for the inputs k, in the columns that are `known`"""
    inside = known[None, :]
    if PADS:
        inside = inside & (k < K)[:, None]
    return tl.load(x + t[None, :] * x_row + k[:, None], mask=inside, other=0.0)


@triton.jit
def _scales(words, FIRST: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr, BT: tl.constexpr):
    """Scales (or minima) of the pieces FIRST .. FIRST + G - 1 in their columns: [n, G * BT], or [n, 1] where G is 1."""
    if G == 1:
        if KIND == 0:
            return half(words[FIRST // 2], FIRST % 2)[:, None]
        else:
            return small_number(words[FIRST // 4], FIRST % 4, KIND == 2)[:, None]
    else:
        piece = (FIRST % 4 + tl.arange(0, G * BT) // BT)[None, :]
        if KIND > 0:
            return small_number(words[FIRST // 4][:, None], piece, KIND == 2)
        elif G == 2:
            return half(words[FIRST // 2][:, None], piece % 2)
        else:
            return half(tl.where(piece < 2, words[FIRST // 2][:, None], words[FIRST // 2 + 1][:, None]), piece % 2)


@triton.jit
def _group_product(
    x, values, block, t, rows, x_row, WITHIN: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    OFF: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, G: tl.constexpr, PADS: tl.constexpr,
):
    """Products of the pieces FIRST .. FIRST + G - 1, each in its columns, fp32 [n, G * BT]; and x times OFF the same way.

    Each piece is a chain of products of its own, and adds exact zeros in the columns of others: none waits for another's.
    """
    column = tl.arange(0, G * BT)
    zeros = tl.zeros((BN, G * BT), tl.float32)
    j = tl.arange(0, GROUP)
    products = ()
    offs = ()
    for g in tl.static_range(G):
        xs = _inputs(x, block * 256 + (FIRST + g) * GROUP + j, t, (t < rows) & (column // BT == g), x_row, K, PADS)
        off = zeros
        if BITS < 8:
            off = tl.dot(tl.full((BN, GROUP), OFF, x.dtype.element_ty), xs, zeros)
        products = products + (tl.dot(values[WITHIN + g], xs, off),)
        offs = offs + (off,)
    return _together(products, G), _together(offs, G)


@triton.jit
def _together(tiles, G: tl.constexpr):
    """The sum of G tiles that differ from zero in columns of their own."""
    if G == 4:
        return (tiles[0] + tiles[1]) + (tiles[2] + tiles[3])
    elif G == 2:
        return tiles[0] + tiles[1]
    else:
        return tiles[0]


@triton.jit
def _block_product(
    acc, x, addresses, block, own, t, rows, x_row, K: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    MINIMA: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, G: tl.constexpr,
    PADS: tl.constexpr, ASSEMBLY: tl.constexpr,
):
    """`acc` with the sums over super-block `block` of W[own[n], k] x[t, k], by classes, [n, columns].

    KIND: 0 scales "half", 1 "six", 2 "eight".
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    BASE: tl.constexpr = 128 if TYPE == tl.bfloat16 else 1024
    WORDS: tl.constexpr = 64 if BITS == 8 else 32
    GROUP: tl.constexpr = 16 if KIND == 2 else 32
    PIECES: tl.constexpr = 4 if BITS == 8 else 8
    SUPERS: tl.constexpr = (K + 255) // 256
    data, high, scales, minima, supers = addresses
    j = tl.arange(0, GROUP)
    tile = (own // 32) * (SUPERS * 32) + block * 32 + own % 32
    scale, minimum, top = scale_words(scales, minima, supers, block, own, PADDED, 2 if KIND == 1 else 4, MINIMA, KIND > 0)
    factor = half(top, 0)[:, None] if KIND > 0 else 1.0
    lower = half(top, 1)[:, None] * (1.0 / BASE) if KIND > 0 else -1.0 / BASE
    for part in tl.static_range(256 // (PIECES * GROUP)):
        column = (part * GROUP + j)[None, :]
        words = tl.load(data + tile[:, None] * WORDS + column)
        if BITS == 8:
            values = signed_bytes(words, TYPE, ASSEMBLY)
        elif BITS == 4:
            values = codes(words, words, BITS, TYPE, BASE, ASSEMBLY)
        else:
            values = codes(words, tl.load(high + tile[:, None] * 32 + column), BITS, TYPE, BASE, ASSEMBLY)
        for p in tl.static_range(0, PIECES, CLASSES):
            following = ()
            for q in tl.static_range(p, p + CLASSES, G):
                products, off = _group_product(x, values, block, t, rows, x_row, q, part * PIECES + q, K, BITS, GROUP, -(BASE + ZERO),
                                               BN, BT, G, PADS)
                sums = tl.fma(products, _scales(scale, part * PIECES + q, KIND, G, BT) * factor, acc[(q - p) // G])
                if MINIMA:
                    sums = tl.fma(off, _scales(minimum, part * PIECES + q, KIND, G, BT) * lower, sums)
                following = following + (sums,)
            acc = following
    return acc


@triton.jit
def _classes(acc, BN: tl.constexpr, BT: tl.constexpr, G: tl.constexpr):
    """[BN, BT]: the classes of pieces, added in one order wherever they are."""
    if G == 4:
        return tl.sum(tl.sum(tl.reshape(acc[0], (BN, 2, 2, BT)), 2), 1)
    elif G == 2:
        return tl.sum(tl.reshape(acc[0], (BN, 2, BT)), 1) + tl.sum(tl.reshape(acc[1], (BN, 2, BT)), 1)
    else:
        return (acc[0] + acc[1]) + (acc[2] + acc[3])


@triton.jit
def _product(
    x, data, first, t, split, rows, x_row, K: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    MINIMA: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ASSEMBLY: tl.constexpr,
):
    """Semantics: y[n, t] = sum over the super-blocks of `split` of W[first + n, k] x[t, k], fp32 [BN, BT] for the BT rows t."""
    SUPERS: tl.constexpr = (K + 255) // 256
    EACH: tl.constexpr = (SUPERS + SPLIT - 1) // SPLIT
    zeros = tl.zeros((BN, G * BT), tl.float32)
    acc = (zeros,) * (CLASSES // G)
    addresses = field_addresses(data, PADDED, K, BITS, KIND, MINIMA)
    own = first + tl.arange(0, BN)
    t = tl.min(t) + tl.arange(0, G * BT) % BT
    for block in tl.range(split * EACH, tl.minimum((split + 1) * EACH, SUPERS), num_stages=STAGES):
        acc = _block_product(acc, x, addresses, block, own, t, rows, x_row, K, PADDED, BITS, KIND, MINIMA, ZERO, BN, BT, G,
                             K % 256 != 0, ASSEMBLY)
    return _classes(acc, BN, BT, G)


@triton.jit(do_not_specialize=["rows", "parts_row", "weights_row"], do_not_specialize_on_alignment=["counters", "stamp"])
def packed_kernel(
    x, data0, data1, data2, bias, out, parts, stream, next_weight, parts_out, sums, a, b, pages, row_weights, h, partials,
    counters, stamp, rows, x_row, out_row, parts_row, weights_row, a_page, b_page, width, eps, scale,
    K: tl.constexpr, ROWS0: tl.constexpr, ROWS1: tl.constexpr, ROWS2: tl.constexpr,
    BITS0: tl.constexpr, KIND0: tl.constexpr, MINIMA0: tl.constexpr, ZERO0: tl.constexpr,
    BITS1: tl.constexpr, KIND1: tl.constexpr, MINIMA1: tl.constexpr, ZERO1: tl.constexpr,
    BITS2: tl.constexpr, KIND2: tl.constexpr, MINIMA2: tl.constexpr, ZERO2: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, SLICES: tl.constexpr, GLU: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    G: tl.constexpr, ROW_TILES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
    PARTS: tl.constexpr, LEVELS: tl.constexpr, PARTS_OUT: tl.constexpr, H_BM: tl.constexpr, H_TILES: tl.constexpr, DEPTH: tl.constexpr,
    STEP: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, MAX_PAGES: tl.constexpr, ASSEMBLY: tl.constexpr, EARLY: tl.constexpr,
):
    """`PROGRAMS` programs for rank rows, then `TILES` * `ROW_TILES` * `SPLIT`; slices begin at 0, E0 and E1."""
    NORM: tl.constexpr = parts is not None
    RANK: tl.constexpr = a is not None
    program = tl.program_id(0)
    if program < PROGRAMS:
        if RANK:
            rank_tasks(program, x, a, pages, row_weights, h, partials, counters, stamp, rows, x_row, a_page, weights_row,
                       K, SLICES, H_BM, H_TILES, DEPTH, STEP, PROGRAMS, MAX_PAGES, EARLY)
    else:
        PADDED0: tl.constexpr = (ROWS0 + 63) // 64 * 64
        PADDED1: tl.constexpr = (ROWS1 + 63) // 64 * 64
        PADDED2: tl.constexpr = (ROWS2 + 63) // 64 * 64
        cell = (program - PROGRAMS) // SPLIT
        split = (program - PROGRAMS) % SPLIT
        tile = cell // ROW_TILES
        t = cell % ROW_TILES * BT + tl.arange(0, BT)
        first = tile * BN
        fill = tl.where(first < PADDED0, 0, PADDED0 - ROWS0 + tl.where(first < PADDED0 + PADDED1, 0, PADDED1 - ROWS1))
        end = tl.where(first < PADDED0, ROWS0, ROWS0 + ROWS1 + tl.where(first < PADDED0 + PADDED1, 0, ROWS2))
        n = first - fill + tl.arange(0, BN)
        inside = n < end
        outputs = n
        if GLU != "":
            outputs = n % 2 * (ROWS0 // 2) + n // 2
        both = (t < rows)[None, :] & inside[:, None]
        if RANK:
            count = tl.load(pages)
            page = tl.load(pages + 1 + tl.arange(0, CHUNK) // 16)
            if EARLY:
                if count > 0:
                    some = tl.load(pages + 1 + tl.minimum(tl.arange(0, CHUNK // 16), count - 1)).to(tl.int64)
                    prefetch(b + some[:, None] * b_page + tl.where(inside, outputs, 0)[None, :] * 16)
        begin(stamp, program, EARLY)
        if stream is not None:
            before = tl.load(stream + t[None, :] * out_row + n[:, None], mask=both, other=0.0)
            following = tl.load(next_weight + n, mask=inside, other=0.0)
        if NORM:
            each = tl.arange(0, 1 << LEVELS)
            squares = tl.load(parts + each[None, :] * parts_row + t[:, None], mask=(t < rows)[:, None] & (each < PARTS)[None, :], other=0.0)
        if ROWS1 == 0 or first < PADDED0:
            y = _product(x, data0, first, t, split, rows, x_row, K, PADDED0, BITS0, KIND0, MINIMA0, ZERO0, BN, BT, G, SPLIT, STAGES,
                         ASSEMBLY)
        elif ROWS2 == 0 or first < PADDED0 + PADDED1:
            y = _product(x, data1, first - PADDED0, t, split, rows, x_row, K, PADDED1, BITS1, KIND1, MINIMA1, ZERO1, BN, BT, G,
                         SPLIT, STAGES, ASSEMBLY)
        else:
            y = _product(x, data2, first - PADDED0 - PADDED1, t, split, rows, x_row, K, PADDED2, BITS2, KIND2, MINIMA2, ZERO2, BN, BT, G,
                         SPLIT, STAGES, ASSEMBLY)
        let_next_begin(EARLY)
        last = True
        if SPLIT > 1:
            part = sums + cell * (SPLIT * BN * BT) + tl.arange(0, BN)[:, None] * BT + tl.arange(0, BT)[None, :]
            last = split == SPLIT - 1
            if last:
                y = gathered(part, y, SPLIT - 1, BN * BT)
            else:
                put(part + split * (BN * BT), y)
        if last:
            if RANK:
                if count > 0:
                    up = _columns(b, page, count, 0, outputs, inside, b_page, CHUNK)
                    rank_ready(counters, SLICES * H_TILES * count, ASSEMBLY)
                    y += _rank_share(up, h, b, pages, count, outputs, inside, tl.min(t), rows, b_page,
                                     E0, E1, SLICES, H_BM * H_TILES, BN, BT, G, CHUNK, MAX_PAGES)
            if NORM:
                y *= tl.rsqrt(row_sums(squares, 1 << LEVELS, LEVELS) / width + eps)[None, :]
            if bias is not None:
                y += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
            if GLU != "":
                _store_gated(y, tile, t, rows, out, out_row, ROWS0, GLU, BN, BT)
            else:
                if stream is not None:
                    y = tl.where(both, before.to(tl.float32) + scale * y, 0.0)
                    tl.store(stream + t[None, :] * out_row + n[:, None], y.to(stream.dtype.element_ty), mask=both)
                    _store_squares(y * y, tile, t, rows, parts_out, parts_row, BN, TILES, PARTS_OUT)
                    y *= following.to(tl.float32)[:, None]
                tl.store(out + t[None, :] * out_row + n[:, None], y.to(out.dtype.element_ty), mask=both)


@triton.jit
def _columns(b, page, count, k, n, inside, b_page, CHUNK: tl.constexpr):
    """B^T [CHUNK, BN] of the rank rows from k on, whose pages are `page`, at outputs n; b [pages, .., d_out, 16]."""
    r = k + tl.arange(0, CHUNK)
    acts = r // 16 < count
    first = tl.max_contiguous(tl.multiple_of(tl.where(acts, page, 0).to(tl.int64) * b_page + r % 16, 16), 16)
    return tl.load(b + first[:, None] + n[None, :] * 16, mask=acts[:, None] & inside[None, :], other=0.0)


@triton.jit
def _rank_share(
    up, h, b, pages, count, outputs, inside, first, rows, b_page, E0: tl.constexpr, E1: tl.constexpr, SLICES: tl.constexpr,
    H_ROWS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr, MAX_PAGES: tl.constexpr,
):
    """B H^T [BN, BT] for the rows from `first` on; `up` is B of the first rank rows. A page is one step of the tensor cores, so others add
    exact zeros."""
    column = tl.arange(0, G * BT)
    t = first + column % BT
    known = (column < BT) & (t < rows)
    share = tl.zeros((BN, G * BT), tl.float32)
    for k in range(0, count * 16, CHUNK):
        if k > 0:
            page = tl.load(pages + 1 + (k + tl.arange(0, CHUNK)) // 16)
            up = _columns(b, page, count, k, outputs, inside, b_page, CHUNK)
        r = k + tl.arange(0, CHUNK)
        acts = (r // 16 < count)[:, None] & known[None, :]
        before = share
        for s in tl.static_range(SLICES):
            own = outputs >= (0 if s == 0 else E0 if s == 1 else E1)
            hs = tl.load(h + (s * H_ROWS + t[None, :]) * (MAX_PAGES * 16) + r[:, None], mask=acts, other=0.0, cache_modifier=".cg")
            share = tl.where(own[:, None], tl.dot(tl.trans(up), hs, before, input_precision="ieee"), share)
    if G > 1:
        share = tl.sum(tl.reshape(share, (BN, G, BT)), 1)
    return share


@triton.jit
def _store_gated(y, tile, t, rows, out, out_row, N: tl.constexpr, GLU: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr):
    """Of y [n, t], row 2 i is of the gate and row 2 i + 1 of the up half."""
    gate, up = tl.split(tl.trans(tl.reshape(y, (BN // 2, 2, BT)), (0, 2, 1)))
    n = tile * (BN // 2) + tl.arange(0, BN // 2)
    tl.store(out + t[None, :] * out_row + n[:, None], gated(gate, up, GLU).to(out.dtype.element_ty),
             mask=(t < rows)[None, :] & (n < N // 2)[:, None])


@triton.jit
def _store_squares(
    squares, tile, t, rows, parts_out, parts_row, BN: tl.constexpr, TILES: tl.constexpr, PARTS_OUT: tl.constexpr,
):
    """A part for every 32 rows of the matrix, added in one order whatever the tile: a dot of fp32 adds its products one after the other."""
    EACH: tl.constexpr = BN // 32
    own = (tl.arange(0, 16)[:, None] == tl.arange(0, BN)[None, :] // 32).to(tl.float32)
    totals = tl.dot(own, squares, input_precision="ieee")
    which = tl.arange(0, 16)[:, None]
    for first in tl.static_range(0, PARTS_OUT, TILES * EACH):
        place = first + tile * EACH + which
        tl.store(parts_out + place * parts_row + t[None, :], totals if first == 0 else totals * 0,
                 mask=(t < rows)[None, :] & (which < EACH) & (place < PARTS_OUT))

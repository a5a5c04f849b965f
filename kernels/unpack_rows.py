"""Repacked rows as numbers again: for products of many rows, and for the rows of an embedding."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from torch import Tensor

from .repack import RepackedRows
from .triton_compat import runs_triton, tl, triton
from .unpack_codes import code, field_addresses, half, lanes, scale_words, small_number

KINDS = {"half": 0, "six": 1, "eight": 2}
"""numbers for the kernels: how scales are kept"""
ROWS = 32
"""of a program"""


def unpack_rows(rows: RepackedRows, ids: Tensor, out: Tensor) -> None:
    """Semantics: out[t] = row ids[t].  ids [T] int64; out [T, d_in] of any float dtype, its rows contiguous."""
    if not runs_triton(out):
        out.copy_(rows.numbers(ids))
        return
    order = rows.order
    _unpack_rows[(-(-len(ids) // ROWS), rows.supers)](
        rows.data, ids, out, len(ids), out.stride(0), K=rows.d_in, PADDED=rows.padded, BITS=order.bits, KIND=KINDS[order.scales],
        MINIMA=int(order.minima), ZERO=order.zero, ROWS=ROWS, num_warps=4)


@triton.jit(do_not_specialize=["count"])
def _unpack_rows(
    data, ids, out, count, out_row, K: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, MINIMA: tl.constexpr,
    ZERO: tl.constexpr, ROWS: tl.constexpr,
):
    WORDS: tl.constexpr = 64 if BITS == 8 else 32
    GROUP: tl.constexpr = 16 if KIND == 2 else 32
    PIECES: tl.constexpr = 4 if BITS == 8 else 8
    SCALES: tl.constexpr = 2 if KIND == 1 else 4
    data, high, scales, minima, supers = field_addresses(data, PADDED, K, BITS, KIND, MINIMA)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    here = place < count
    row = tl.load(ids + place, mask=here, other=0).to(tl.int32)
    tile = (row // 32) * ((K + 255) // 256 * 32) + block * 32 + row % 32
    into = out + place.to(tl.int64)[:, None] * out_row
    j = tl.arange(0, GROUP)
    scale, minimum, top = scale_words(scales, minima, supers, block, row, PADDED, SCALES, MINIMA, KIND > 0)
    for part in tl.static_range(256 // (PIECES * GROUP)):
        at = data + tile[:, None] * WORDS + (part * GROUP + j)[None, :]
        if BITS == 8:
            words = tl.load(at, mask=here[:, None], other=0)
        else:
            odd = (j % 2)[None, :]
            words = lanes(tl.load(at - odd, mask=here[:, None], other=0), tl.load(at - odd + 1, mask=here[:, None], other=0), odd)
        above = words
        if BITS == 5 or BITS == 6:
            above = tl.load(high + tile[:, None] * 32 + (part * GROUP + j)[None, :], mask=here[:, None], other=0)
        for p in tl.static_range(PIECES):
            if KIND == 0:
                s = half(scale[(part * PIECES + p) // 2], p % 2)
            else:
                s = half(top, 0) * small_number(scale[(part * PIECES + p) // 4], p % 4, KIND == 2)
            if BITS == 8:
                q = (words << (24 - 8 * p)) >> 24
            else:
                q = code(words, above, p, BITS) - ZERO
            y = q.to(tl.float32) * s[:, None]
            if MINIMA:
                if KIND == 0:
                    y += half(minimum[(part * PIECES + p) // 2], p % 2)[:, None]
                else:
                    y -= (half(top, 1) * small_number(minimum[(part * PIECES + p) // 4], p % 4, False))[:, None]
            k = block * 256 + (part * PIECES + p) * GROUP + j
            tl.store(into + k[None, :], y.to(out.dtype.element_ty), mask=here[:, None] & (k < K)[None, :])

"""The rank rows of a step with any number of rows: one kernel computes H, another adds H B^T to the base's product.

A unit is one page in one slice: 16 columns of H. Those of a tile of rows lie page by page, in each slice by slice.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .triton_compat import tl, triton


@triton.jit(do_not_specialize=["rows", "layer", "most", "groups", "splits", "slices", "weights_row"],
            do_not_specialize_on_alignment=["counts", "pages", "columns", "row_weights", "arrivals"])
def shrink_kernel(
    x, a, counts, pages, columns, row_weights, h, partials, arrivals, rows, layer, x_row, a_page, a_layer, weights_row, h_row, d_in, depth,
    most, groups, splits, slices, BM: tl.constexpr, UNITS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):
    """h [rows, units * 16] = weights * (x A^T): a program does UNITS units of a tile of BM rows over `depth` inputs.

    Whoever ends last adds the parts of all, first to last, and leaves the counter of the tile at zero.
    """
    program = tl.program_id(0)
    split = program % splits
    group = program // splits % groups
    tile = program // splits // groups
    count = tl.load(counts + tile)
    if group * UNITS < count * slices:
        c = tl.arange(0, UNITS * 16)
        unit = group * UNITS + c // 16
        acts = unit < count * slices
        place = unit // slices
        page = tl.load(pages + tile * most + place, mask=acts, other=0).to(tl.int64)
        first = page * a_page + layer * a_layer + ((unit % slices) * 16 + c % 16) * d_in
        m = tile * BM + tl.arange(0, BM)
        here = (m < rows)[:, None]
        d = split * depth + tl.arange(0, BK)
        xs = x + m.to(tl.int64)[:, None] * x_row
        sums = tl.zeros((BM, UNITS * 16), tl.float32)
        for k in tl.range(0, depth, BK, num_stages=STAGES):
            known = d + k < d_in
            rank = tl.load(a + first[None, :] + (d + k)[:, None], mask=known[:, None] & acts[None, :], other=0.0)
            xk = tl.load(xs + (d + k)[None, :], mask=here & known[None, :], other=0.0)
            sums = tl.dot(xk, rank, sums, input_precision="ieee")
        last = splits == 1
        if splits > 1:
            task = tile * groups + group
            mine = tl.arange(0, BM)[:, None] * (UNITS * 16) + c[None, :]
            parts = partials + task.to(tl.int64) * splits * (BM * UNITS * 16) + mine
            tl.store(parts + split * (BM * UNITS * 16), sums, mask=acts[None, :])
            tl.debug_barrier()
            last = tl.atomic_add(arrivals + task, 1, sem="acq_rel") == splits - 1
            if last:
                sums = tl.zeros((BM, UNITS * 16), tl.float32)
                for other in tl.range(0, splits, 4, num_stages=1):
                    for next in tl.static_range(4):  # under way at once
                        there = unit < tl.where(other + next < splits, count * slices, 0)
                        sums += tl.load(parts + (other + next) * (BM * UNITS * 16), mask=there[None, :], other=0.0, cache_modifier=".cg")
                tl.store(arrivals + task, 0)
        if last:
            column = tl.load(columns + tile * most + place, mask=acts, other=0)
            weight = tl.load(row_weights + m[:, None] * weights_row + column[None, :], mask=here & acts[None, :], other=0.0)
            tl.store(h + m.to(tl.int64)[:, None] * h_row + unit[None, :] * 16 + (c % 16)[None, :], (sums * weight).to(h.dtype.element_ty),
                     mask=here & acts[None, :])


@triton.jit(do_not_specialize=["rows", "layer", "most", "slices", "tiles0", "tiles1"],
            do_not_specialize_on_alignment=["counts", "pages", "touched"])
def expand_kernel(
    y, b, counts, pages, touched, h, layer, b_page, b_layer, h_row, most, rows, y_row, slices, end0, end1, end2, tiles0, tiles1,
    BM: tl.constexpr, BN: tl.constexpr,
):
    """y [rows, d_out] += H B^T, in place, on the rows that are `touched`; a program does BM rows at BN outputs of one slice."""
    n_tile = tl.program_id(0)
    tile = tl.program_id(1)
    count = tl.load(counts + tile)
    m = tile * BM + tl.arange(0, BM)
    acts = tl.load(touched + m, mask=m < rows, other=0) != 0
    if count > 0:
        s = (n_tile >= tiles0).to(tl.int32) + (n_tile >= tiles1).to(tl.int32)
        start = tl.where(s == 0, 0, tl.where(s == 1, end0, end1))
        end = tl.where(s == 0, end0, tl.where(s == 1, end1, end2))
        n = start + (n_tile - tl.where(s == 0, 0, tl.where(s == 1, tiles0, tiles1))) * BN + tl.arange(0, BN)
        inside = n < end
        at = y + m.to(tl.int64)[:, None] * y_row + n[None, :]
        both = acts[:, None] & inside[None, :]
        before = tl.load(at, mask=both, other=0.0)
        r = tl.arange(0, 16)
        sums = tl.zeros((BM, BN), tl.float32)
        for place in range(0, count):
            page = tl.load(pages + tile * most + place).to(tl.int64) * b_page + layer * b_layer
            up = tl.load(b + page + r[:, None] + n[None, :] * 16, mask=inside[None, :], other=0.0)
            low = tl.load(h + m.to(tl.int64)[:, None] * h_row + (place * slices + s) * 16 + r[None, :], mask=acts[:, None], other=0.0)
            sums = tl.dot(low, up, sums, input_precision="ieee")
        tl.store(at, (before.to(tl.float32) + sums).to(y.dtype.element_ty), mask=both)

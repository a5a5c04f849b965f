"""The kernels of row_changes.py: a program has a row, or some outputs of one, and does nothing where that row has no profile."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .decode_linear_triton import gated
from .triton_compat import tl, triton


@triton.jit
def _change(y, bias, gains, shifts, at, late, late_at, n, inside):
    gain = tl.load(gains + at + n, mask=inside, other=0.0)
    if bias is not None:
        base = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        y = (y - base) * gain + base
    else:
        y *= gain
    y += tl.load(shifts + at + n, mask=inside, other=0.0)
    if late is not None:
        y += tl.load(late + late_at + n, mask=inside, other=0.0)
    return y


@triton.jit
def change_kernel(y, bias, which, gains, shifts, late, y_row, profile_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    profile = tl.load(which + row).to(tl.int64)
    if profile > 0:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = n < WIDTH
        place = y + row.to(tl.int64) * y_row + n
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = _change(value, bias, gains, shifts, (profile - 1) * profile_row, late, row.to(tl.int64) * WIDTH, n, inside)
        tl.store(place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    y, bias, which, gains, shifts, late, out, y_row, out_row, profile_row, WIDTH: tl.constexpr, GLU: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    profile = tl.load(which + row).to(tl.int64)
    if profile > 0:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = n < WIDTH
        place, at = y + row.to(tl.int64) * y_row + n, (profile - 1) * profile_row
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
        late_at = row.to(tl.int64) * 2 * WIDTH
        gate = _change(gate, bias, gains, shifts, at, late, late_at, n, inside)
        up = _change(up, bias, gains, shifts, at, late, late_at, n + WIDTH, inside)
        tl.store(out + row.to(tl.int64) * out_row + n, gated(gate, up, GLU).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weight(weight, changes, changes_row, profile, place, inside):
    value = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if profile > 0:
        value += tl.load(changes + (profile - 1) * changes_row + place, mask=inside, other=0.0)
    return value


@triton.jit
def _ready(
    value, row, at, place, inside, profile, before, before_changes, before_row, out, parts, parts_row, eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):
    x = tl.where(inside, value, 0.0)
    squares = tl.sum(x * x, 0)
    if before is not None:
        if parts is None:
            x *= tl.rsqrt(squares / WIDTH + eps)
        x *= _weight(before, before_changes, before_row, profile, place, inside)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)
    if parts is not None:
        part = tl.arange(0, PARTS_BLOCK)
        tl.store(parts + part * parts_row + row, tl.where(part == 0, squares, 0.0), mask=part < PARTS)


@triton.jit
def begin_kernel(
    which, embedded, embeddings, before, before_changes, before_row, stream, shared, out, parts, parts_row, scale, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    profile, own = tl.load(which + row).to(tl.int64), tl.load(embedded + row)
    if (profile > 0) | (own > 0):
        place = tl.arange(0, BLOCK)
        inside = place < WIDTH
        at = row.to(tl.int64) * WIDTH + place
        value = tl.load(shared + at, mask=inside, other=0.0)
        if own > 0:
            value = (scale * tl.load(embeddings + at, mask=inside, other=0.0).to(tl.float32)).to(shared.dtype.element_ty)
        if profile > 0:
            tl.store(stream + at, value, mask=inside)
            tl.store(shared + at, tl.zeros((BLOCK,), shared.dtype.element_ty), mask=inside)
        else:
            tl.store(shared + at, value, mask=inside)
        _ready(value.to(tl.float32), row, at, place, inside, profile, before, before_changes, before_row, out, parts, parts_row, eps,
               WIDTH, PARTS, PARTS_BLOCK)


@triton.jit
def join_kernel(
    which, y, bias, gains, shifts, late, profile_row, after, after_changes, after_row, before, before_changes, before_row,
    stream, shared, out, parts, parts_row, divisor, scale, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    profile = tl.load(which + row).to(tl.int64)
    if profile > 0:
        place = tl.arange(0, BLOCK)
        inside = place < WIDTH
        at = row.to(tl.int64) * WIDTH + place
        z = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) / divisor
        z = _change(z, bias, gains, shifts, (profile - 1) * profile_row, late, row.to(tl.int64) * WIDTH, place, inside)
        if after is not None:
            z = tl.where(inside, z, 0.0)
            z *= tl.rsqrt(tl.sum(z * z, 0) / WIDTH + eps) * _weight(after, after_changes, after_row, profile, place, inside)
        value = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32) + scale * z
        value = value.to(stream.dtype.element_ty)
        tl.store(stream + at, value, mask=inside)
        tl.store(shared + at, tl.zeros((BLOCK,), shared.dtype.element_ty), mask=inside)
        _ready(value.to(tl.float32), row, at, place, inside, profile, before, before_changes, before_row, out, parts, parts_row, eps,
               WIDTH, PARTS, PARTS_BLOCK)

"""Parts of sums that programs of one launch hand to the one that adds them up.

A number is its own sign that it has come: who waits for it makes one trip to the L2 cache, where a flag takes one of its own and a fence
before it. It lies there as its bits inverted, and 0, the inverse of a NaN, where it is yet to come: all places are zero before a launch,
and zero again when they have been read. A program waits only for such as come before it in the grid, which begins in its order.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .triton_compat import tl, triton


@triton.jit
def put(place, values):
    """Hand over fp32 `values`; places are int32. A NaN whose inverse is 0 becomes another one."""
    bits = ~values.to(tl.int32, bitcast=True)
    tl.store(place, tl.where(bits == 0, 1, bits))


@triton.jit
def gathered(place, last, PARTS: tl.constexpr, STRIDE: tl.constexpr):
    """The sum of the parts at `place`, `STRIDE` apart, and of the `last` [n, t], in this order, when they are there."""
    bits = _look(place, PARTS, STRIDE)
    while _missing(bits, PARTS):
        bits = _look(place, PARTS, STRIDE)
    total = tl.zeros(last.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += (~bits[part]).to(tl.float32, bitcast=True)
        tl.store(place + part * STRIDE, tl.zeros(last.shape, tl.int32))
    return total + last


@triton.jit
def _look(place, PARTS: tl.constexpr, STRIDE: tl.constexpr):
    bits = ()
    for part in tl.static_range(PARTS):
        bits = bits + (tl.load(place + part * STRIDE, volatile=True),)
    return bits


@triton.jit
def _missing(bits, PARTS: tl.constexpr):
    missing = bits[0] == 0
    for part in tl.static_range(1, PARTS):
        missing |= bits[part] == 0
    return tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0

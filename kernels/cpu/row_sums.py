"""Sums over rows of numbers in memory, fp32 or bf16, with all that is summed in registers: what adapters and attention are made of."""
from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vectors import CACHE_LINE, F32, I64, LANES, VF32, VI16, VI32, ZEROS, at, fma, load, prefetch, splat, store

AHEAD = 1024
"""bytes; how far behind what is added memory is fetched"""
WIDE = 4 * LANES
"""numbers of a row that `add_rows` takes at once"""


def _numbers(builder: ir.IRBuilder, address: ir.Value, short: bool) -> ir.Value:
    """LANES of them at `address`, bf16 where `short`."""
    if not short:
        return load(builder, address, VF32)
    shift = ir.Constant(VI32, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(load(builder, address, VI16), VI32), shift), VF32)


def _dot(short: bool) -> Callable[[int, int, int], float]:
    @intrinsic
    def dot(typing, x, a, count):
        def build(context, builder, signature, arguments):
            x, a, count = arguments
            sums = [cgutils.alloca_once_value(builder, ZEROS) for _ in (0, 1)]
            pairs = builder.lshr(count, I64(5))

            def add(number: int, index: ir.Value) -> None:
                product = fma(builder, load(builder, at(builder, x, index, 4), VF32),
                              _numbers(builder, at(builder, a, index, 2 if short else 4), short), builder.load(sums[number]))
                builder.store(product, sums[number])

            with cgutils.for_range(builder, pairs, intp=I64) as loop:
                first = builder.mul(loop.index, I64(2 * LANES))
                add(0, first)
                add(1, builder.add(first, I64(LANES)))
            with builder.if_then(builder.trunc(builder.lshr(count, I64(4)), ir.IntType(1))):
                add(0, builder.mul(pairs, I64(2 * LANES)))
            kind = ir.FunctionType(F32, [F32, VF32])
            reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
            both = builder.fadd(*(builder.load(each) for each in sums))
            return builder.call(reduce, [ir.Constant(F32, 0.0), both], fastmath=("reassoc",))
        return types.float32(types.int64, types.int64, types.int64), build
    return dot


dot, dot_bf16 = (_dot(short) for short in (False, True))
"""(x, a, count) -> sum_i x[i] a[i]: addresses of fp32, and of fp32 or bf16; `count` a multiple of LANES"""


def _add_rows(short: bool, width: int) -> Callable[[int, int, int, int, int], None]:
    @intrinsic
    def add_rows(typing, factors, first, stride, count, out):
        def build(context, builder, signature, arguments):
            factors, first, stride, count, out = arguments
            places = [builder.add(out, I64(4 * start)) for start in range(0, width, LANES)]
            sums = [cgutils.alloca_once_value(builder, ZEROS) for _ in places]
            for place, total in zip(places, sums, strict=True):
                builder.store(load(builder, place, VF32), total)
            with cgutils.for_range(builder, count, intp=I64) as loop:
                factor = splat(builder, load(builder, at(builder, factors, loop.index, 4), F32))
                row = builder.add(first, builder.mul(stride, loop.index))
                for line in range(0, (2 if short else 4) * width, CACHE_LINE):
                    prefetch(builder, builder.add(row, I64(AHEAD + line)))
                for number, total in enumerate(sums):
                    found = _numbers(builder, builder.add(row, I64((2 if short else 4) * LANES * number)), short)
                    builder.store(fma(builder, factor, found, builder.load(total)), total)
            for place, total in zip(places, sums, strict=True):
                store(builder, builder.load(total), place)
            return context.get_dummy_value()
        return types.void(*[types.int64] * 5), build
    return add_rows


add_rows, add_rows_bf16, add_rows_narrow = _add_rows(False, WIDE), _add_rows(True, WIDE), _add_rows(False, LANES)
"""(factors, first, stride, count, out): out[o] += sum_k factors[k] row k [o], in the order of the rows: addresses, bytes from row to row;
factors and out fp32. For WIDE outputs, or LANES of them"""


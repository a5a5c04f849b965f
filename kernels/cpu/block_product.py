"""The inner product of packed rows: 32 rows of a matrix with a few rows of x at once, all sums in registers."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vectors import CACHE_LINE, F32, I64, LANES, VF16, VF32, VI8, VI32, ZEROS, at, fma, load, prefetch, splat, store

BLOCK = 2 * LANES
"""rows of the matrix that lie together"""
AHEAD = 1536
"""bytes; how far behind what is multiplied memory is fetched"""
AT_ONCE = (1, 2, 4)
"""rows of x that a product takes"""
UNROLLED = 8
"""places of a row that follow each other without a branch"""


class CodeKind(NamedTuple):
    """How numbers are packed: a number is scale * code, and its group's offset more where there are `offsets`."""

    bits: int
    """4, unsigned: of the rows j and j + 16 of a block in one byte, the lower one first; or 8, signed"""
    group: int
    """numbers of a row that share a scale"""
    offsets: bool

    @property
    def step_bytes(self) -> int:
        """of the codes of a block at one place of its rows"""
        return BLOCK * self.bits // 8

    @property
    def code_bytes(self) -> int:
        """of a group of a block; behind them its scales, fp16, row beside row, and the offsets behind these"""
        return self.group * self.step_bytes

    @property
    def group_bytes(self) -> int:
        return self.code_bytes + 2 * BLOCK * (1 + self.offsets)


def block_product(kinds: Sequence[CodeKind]) -> Callable[..., None]:
    """For numba: product(kind, rows, data, groups, x, x_stride, sums, sums_stride, y), all int64: the place of one of `kinds`, one of
    AT_ONCE, and addresses and counts of floats.

    Semantics: y[t, j] = sum_i x[t, i] w[j, i] for `rows` rows of x and the 32 rows of a block. x fp32 [rows, x_stride], `sums` fp32
    [rows, sums_stride] the sums of x over its groups (read where the kind has offsets), y fp32 [rows, 32]. A sum is made in an order
    that does not depend on `rows`, and by fp32 throughout.
    """
    @intrinsic
    def product(typing, kind, rows, data, groups, x, x_stride, sums, sums_stride, y):
        def build(context, builder, signature, arguments):
            for number, each in enumerate(kinds):
                for count in AT_ONCE:
                    its, here = (builder.icmp_signed("==", arguments[i], I64(value)) for i, value in ((0, number), (1, count)))
                    with builder.if_then(builder.and_(its, here)):
                        _multiply(builder, each, count, arguments[2:])
            return context.get_dummy_value()
        return types.void(*[types.int64] * 9), build

    return product


def _multiply(builder: ir.IRBuilder, kind: CodeKind, rows: int, arguments: Sequence[ir.Value]) -> None:
    """Of one kind, for so many rows. `arguments`: those of the product behind these two."""
    def number(codes: ir.Value) -> list[ir.Value]:
        """The codes of a block at one place, as floats of its two halves."""
        if kind.bits == 8:
            return [builder.sitofp(builder.sext(load(builder, builder.add(codes, I64(LANES * half)), VI8), VI32), VF32) for half in (0, 1)]
        both = builder.zext(load(builder, codes, VI8), VI32)
        low, high = builder.and_(both, ir.Constant(VI32, [15] * LANES)), builder.lshr(both, ir.Constant(VI32, [4] * LANES))
        return [builder.uitofp(low, VF32), builder.uitofp(high, VF32)]

    def add_group(group: ir.Value) -> None:
        data, _, x, x_stride, sums, sums_stride, _ = arguments
        first = at(builder, data, group, kind.group_bytes)
        for line in range(0, kind.group_bytes, CACHE_LINE):
            prefetch(builder, builder.add(first, I64(AHEAD + line)))
        x_rows = [at(builder, at(builder, x, builder.mul(x_stride, I64(row)), 4), group, 4 * kind.group) for row in range(rows)]
        # two chains of sums for each: one alone would wait for itself
        parts = [[[cgutils.alloca_once_value(builder, ZEROS) for _ in (0, 1)] for _ in (0, 1)] for _ in range(rows)]
        for part in (part for row in parts for chain in row for part in chain):
            builder.store(ZEROS, part)
        with cgutils.for_range(builder, I64(kind.group // UNROLLED), intp=I64) as loop:
            for place in range(UNROLLED):
                here = builder.add(builder.mul(loop.index, I64(UNROLLED)), I64(place))
                numbers = number(at(builder, first, here, kind.step_bytes))
                for row in range(rows):
                    factor = splat(builder, load(builder, at(builder, x_rows[row], here, 4), F32))
                    for half, part in enumerate(parts[row][place % 2]):
                        builder.store(fma(builder, numbers[half], factor, builder.load(part)), part)
        found = builder.add(first, I64(kind.code_bytes))
        for half in (0, 1):
            scale = builder.fpext(load(builder, builder.add(found, I64(2 * LANES * half)), VF16), VF32)
            offset = None
            if kind.offsets:
                offset = builder.fpext(load(builder, builder.add(found, I64(2 * BLOCK + 2 * LANES * half)), VF16), VF32)
            for row in range(rows):
                both = builder.fadd(*(builder.load(chain[half]) for chain in parts[row]))
                total = fma(builder, scale, both, builder.load(totals[row][half]))
                if kind.offsets:
                    whole = load(builder, at(builder, at(builder, sums, builder.mul(sums_stride, I64(row)), 4), group, 4), F32)
                    total = fma(builder, offset, splat(builder, whole), total)
                builder.store(total, totals[row][half])

    totals = [[cgutils.alloca_once_value(builder, ZEROS) for _ in (0, 1)] for _ in range(rows)]
    for total in (total for row in totals for total in row):
        builder.store(ZEROS, total)
    with cgutils.for_range(builder, arguments[1], intp=I64) as loop:
        add_group(loop.index)
    for row in range(rows):
        for half in (0, 1):
            store(builder, builder.load(totals[row][half]), builder.add(arguments[-1], I64(4 * (BLOCK * row + LANES * half))))


@intrinsic
def call_product(typing, address, kind, rows, data, groups, x, x_stride, sums, sums_stride, y):
    """Call a block product at an `address`."""
    def build(context, builder, signature, arguments):
        function = ir.FunctionType(ir.VoidType(), [I64] * 9)
        builder.call(builder.inttoptr(arguments[0], function.as_pointer()), arguments[1:])
        return context.get_dummy_value()
    return types.void(*[types.int64] * 10), build

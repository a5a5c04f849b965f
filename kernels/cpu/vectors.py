"""LLVM inside numba: vectors of sixteen lanes, cut to the registers that a machine has; addresses, atomics, and a clock."""
from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import summing

LANES = 16
CACHE_LINE = 64
"""bytes"""
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, VF32 = ir.FloatType(), ir.VectorType(ir.FloatType(), LANES)
VF16, VI8, VI16, VI32 = (ir.VectorType(kind, LANES) for kind in (ir.HalfType(), I8, I16, I32))
ZEROS = ir.Constant(VF32, [0.0] * LANES)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """`kind` at an integer `address`, wherever that lies."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """`value` in all lanes."""
    vector = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(VI32, [0] * LANES))


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VF32, [VF32] * 3), f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line there, which need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), I32(0), I32(3), I32(1)])


def at(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, nbytes: int) -> ir.Value:
    """The address of element `index`, of `nbytes` each."""
    return builder.add(address, builder.mul(index, I64(nbytes)))


@intrinsic
def pointer(typing, address):
    """int64 -> what the functions below read from."""
    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)
    return types.voidptr(types.int64), build


def _reader(kind: ir.Type, result: types.Type, number: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> Callable[[int, int], float]:
    @intrinsic
    def reader(typing, pointer, index):
        def build(context, builder, signature, arguments):
            place = builder.gep(builder.bitcast(arguments[0], kind.as_pointer()), [arguments[1]])
            return number(builder, builder.load(place, align=1))
        return result(types.voidptr, types.int64), build
    return reader


half_at = _reader(ir.HalfType(), types.float32, lambda builder, found: builder.fpext(found, F32))
"""(pointer, index) -> the number there; so the others"""
code_at = _reader(I8, types.int32, lambda builder, found: builder.zext(found, I32))
signed_at = _reader(I8, types.int32, lambda builder, found: builder.sext(found, I32))


@intrinsic
def prefetch_at(typing, address):
    """Ask for the cache line at an int64 `address`."""
    def build(context, builder, signature, arguments):
        prefetch(builder, arguments[0])
        return context.get_dummy_value()
    return types.void(types.int64), build


@intrinsic
def float_of_bits(typing, bits):
    """int32 -> the float32 of these bits."""
    def build(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], F32)
    return types.float32(types.int32), build


@intrinsic
def fetch_add(typing, address, count):
    """Add `count` to the int64 at `address` and return what it was; everybody sees what was written before."""
    def build(context, builder, signature, arguments):
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], I64.as_pointer()), arguments[1], "seq_cst")
    return types.int64(types.int64, types.int64), build


@intrinsic
def read(typing, address):
    """The int64 at `address`, and with it all that was written before it was."""
    def build(context, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], I64.as_pointer()), "acquire", 8)
    return types.int64(types.int64), build


@intrinsic
def write(typing, address, value):
    """Set the int64 at `address` where others `read` it."""
    def build(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), build


@intrinsic
def give_way(typing):
    """Let another thread have this core (sched_yield)."""
    def build(context, builder, signature, arguments):
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()
    return types.void(), build


@intrinsic
def sleep(typing, microseconds):
    """Leave this core idle for about so long (usleep), an int32."""
    def build(context, builder, signature, arguments):
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [I32]), "usleep"), arguments)
        return context.get_dummy_value()
    return types.void(types.int32), build


@intrinsic
def ticks(typing):
    """A clock that only differences and their shares say something of."""
    name = "llvm.readcyclecounter" if platform.machine() in ("x86_64", "AMD64") else "llvm.readsteadycounter"

    def build(context, builder, signature, arguments):
        return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, []), name), [])
    return types.int64(), build


LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_TERMS = tuple(np.float32(term) for term in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1))
LEAST, MOST = np.float32(-87.0), np.float32(88.0)
HALF, ONE, ZERO = np.float32(0.5), np.float32(1), np.float32(0)


@summing
def exp(x):
    """e^x of a float32, to 2 units in the last place, by operations that vectors have; 0 up to -87, e^88 from 88 on, NaN for NaN."""
    bounded = x if x > LEAST else LEAST
    bounded = bounded if bounded < MOST else MOST
    turns = np.floor(bounded * LOG2_E + HALF)
    rest = bounded - turns * LN2_HIGH - turns * LN2_LOW
    a, b, c, d, e, f = EXP_TERMS
    power = (((((a * rest + b) * rest + c) * rest + d) * rest + e) * rest + f) * rest + ONE
    result = power * float_of_bits(np.int32((np.int32(turns) + np.int32(127)) << np.int32(23)))
    return ZERO if x <= LEAST else (result if x > LEAST else x)

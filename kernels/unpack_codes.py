"""Codes of repacked rows as numbers that tensor cores take, inside a kernel.

A code of up to 7 bits becomes a 16-bit float by an OR: of 128 in bf16 and of 1024 in fp16 the last bits count ones. So the numbers are
BASE + code, exactly, and the kernel subtracts BASE by a product of its own.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .repack import PIECES
from .triton_compat import HAS_TRITON, tl, triton

constant = tl.constexpr if HAS_TRITON else (lambda value: value)


def _assembly(bits: int, base: int) -> str:
    """Two neighbours at a time, whose lanes lie side by side: a shift and an AND-OR for every piece of a code."""
    lines = ["{ .reg .b32 c, t;", {4: "", 5: "prmt.b32 c, $10, $11, 0x5410;", 6: "mov.b32 c, $10;"}[bits]]
    for index, pieces in enumerate(PIECES[bits]):
        for number, (lane, shift, mask) in enumerate(pieces):
            source, other = ("$8", "$9", "c")[lane], f"{base:#x}" if number == 0 else f"${index}"
            if shift:
                lines.append(f"shr.b32 t, {source}, {shift};")
                source = "t"
            lines.append(f"lop3.b32 ${index}, {source}, {mask * 0x10001:#x}, {other}, 0xea;")
    return " ".join([*lines, "}"])


_CODES = {bits: {base: constant(_assembly(bits, base * 0x10001)) for base in (0x4300, 0x6400)} for bits in PIECES}
_4_BF16, _4_FP16 = _CODES[4].values()
_5_BF16, _5_FP16 = _CODES[5].values()
_6_BF16, _6_FP16 = _CODES[6].values()
_BYTES_BF16 = constant("{ .reg .b32 a, s, m; mov.b32 m, 0xbf80bf80; " + " ".join(  # GPUs before 9.0 cannot subtract bf16
    f"prmt.b32 a, $4, $5, {index * 0x1111 + 0x4400:#x}; lop3.b32 ${index}, a, 0x7f007f, 0x43004300, 0xea; "
    f"lop3.b32 s, a, 0x800080, 0x43004300, 0xea; fma.rn.bf16x2 ${index}, s, m, ${index};" for index in range(4)) + " }")
_BYTES_FP16 = constant("{ .reg .b32 a, z; mov.b32 z, 0x64806480; " + " ".join(
    f"prmt.b32 a, $4, $5, {index * 0x1111 + 0x4400:#x}; xor.b32 a, a, 0x800080; lop3.b32 ${index}, a, 0xff00ff, 0x64006400, 0xea; "
    f"sub.rn.f16x2 ${index}, ${index}, z;" for index in range(4)) + " }")


@triton.jit
def codes(words, high, BITS: tl.constexpr, TYPE: tl.constexpr, BASE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """int32 words [.., n] as they are stored and their high bytes -> 8 tiles of BASE + code of TYPE, for 4, 5 or 6 bits."""
    if ASSEMBLY:
        if BITS == 4:
            return _eight(_4_BF16 if TYPE == tl.bfloat16 else _4_FP16, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", (words,), TYPE)
        elif BITS == 5:
            return _eight(_5_BF16 if TYPE == tl.bfloat16 else _5_FP16, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
                          (words, high.to(tl.int32)), TYPE)
        else:
            return _eight(_6_BF16 if TYPE == tl.bfloat16 else _6_FP16, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", (words, high), TYPE)
    else:
        first, second = tl.split(tl.reshape(words, words.shape[:-1] + [words.shape[-1] // 2, 2]))
        words = tl.reshape(tl.join(lanes(first, second, 0), lanes(first, second, 1)), words.shape)
        return ((code(words, high, 0, BITS) + BASE).to(TYPE), (code(words, high, 1, BITS) + BASE).to(TYPE),
                (code(words, high, 2, BITS) + BASE).to(TYPE), (code(words, high, 3, BITS) + BASE).to(TYPE),
                (code(words, high, 4, BITS) + BASE).to(TYPE), (code(words, high, 5, BITS) + BASE).to(TYPE),
                (code(words, high, 6, BITS) + BASE).to(TYPE), (code(words, high, 7, BITS) + BASE).to(TYPE))


@triton.jit
def _eight(assembly: tl.constexpr, constraints: tl.constexpr, inputs, TYPE: tl.constexpr):
    if TYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            assembly, constraints, inputs, is_pure=True, pack=2,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16))
    else:
        return tl.inline_asm_elementwise(
            assembly, constraints, inputs, is_pure=True, pack=2,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16))


@triton.jit
def lanes(first, second, odd):
    """The two lanes of a neighbour in one word: they are stored as the lower (`odd` = 0) or upper halves of two words."""
    return (first >> (16 * odd)) & 0xFFFF | (second >> (16 * odd)) << 16


@triton.jit
def code(words, high, P: tl.constexpr, BITS: tl.constexpr):
    """Code P of a word with the lanes of one neighbour, int32, for 4, 5 or 6 bits: as PIECES says."""
    if BITS == 4:
        return (words >> (4 * P)) & 15
    above = high.to(tl.int32)
    if BITS == 5:
        if P < 6:
            return (words >> (16 * (P // 3) + 5 * (P % 3))) & 31
        elif P == 6:
            return above & 31
        else:
            return ((words >> 15) & 1) | ((words >> 30) & 2) | ((above >> 3) & 28)
    elif P < 4:
        return (words >> (16 * (P // 2) + 6 * (P % 2))) & 63
    elif P < 6:
        return (above >> (6 * (P - 4))) & 63
    else:
        return ((words >> (16 * (P - 6) + 12)) & 15) | ((above >> (8 + 2 * (P - 6))) & 48)


@triton.jit
def signed_bytes(words, TYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """int32 words -> 4 tiles of their signed bytes of TYPE."""
    if ASSEMBLY:
        if TYPE == tl.bfloat16:
            return tl.inline_asm_elementwise(_BYTES_BF16, "=&r,=&r,=&r,=&r,r,r", [words], is_pure=True, pack=2,
                                             dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16))
        else:
            return tl.inline_asm_elementwise(_BYTES_FP16, "=&r,=&r,=&r,=&r,r,r", [words], is_pure=True, pack=2,
                                             dtype=(tl.float16, tl.float16, tl.float16, tl.float16))
    else:
        return ((words << 24) >> 24).to(TYPE), ((words << 16) >> 24).to(TYPE), ((words << 8) >> 24).to(TYPE), (words >> 24).to(TYPE)


@triton.jit
def small_number(words, P: tl.constexpr, SIGNED: tl.constexpr):
    """Byte P of the words in fp32."""
    return ((words << (24 - 8 * P)) >> 24 if SIGNED else (words >> (8 * P)) & 255).to(tl.float32)


@triton.jit
def half(words, P: tl.constexpr):
    """The lower (P = 0) or upper half of the words, an fp16 number, in fp32."""
    return ((words >> (16 * P)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def field_addresses(data, PADDED: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, MINIMA: tl.constexpr):
    """Where the fields of RepackedRows.data begin: codes, high bytes, scales, minima, scales of super-blocks.

    KIND: 0 scales "half", 1 "six", 2 "eight".
    """
    CELLS: tl.constexpr = (K + 255) // 256 * PADDED
    WORDS: tl.constexpr = 64 if BITS == 8 else 32
    SCALES: tl.constexpr = 2 if KIND == 1 else 4
    scales = data + CELLS * (WORDS + (8 * (BITS - 4) if BITS < 8 else 0))
    minima = scales + CELLS * SCALES
    high = (data + CELLS * WORDS).to(tl.pointer_type(tl.uint8 if BITS == 5 else tl.int16))
    return data, high, scales, minima, minima + CELLS * SCALES * MINIMA


@triton.jit
def scale_words(scales, minima, supers, block, n, PADDED: tl.constexpr, SCALES: tl.constexpr, MINIMA: tl.constexpr, SUPERS: tl.constexpr):
    """The words of the scales of super-block `block` of the rows n: (scales, minima, scales of the super-block)."""
    at = block * (SCALES * PADDED) + n
    top = tl.load(supers + block * PADDED + n) if SUPERS else 0
    return _plane(scales + at, PADDED, SCALES), _plane(minima + at, PADDED, SCALES) if MINIMA else (), top


@triton.jit
def _plane(at, PADDED: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 2:
        return tl.load(at), tl.load(at + PADDED)
    else:
        return tl.load(at), tl.load(at + PADDED), tl.load(at + 2 * PADDED), tl.load(at + 3 * PADDED)

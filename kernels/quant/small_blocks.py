"""Blocks of 32 elements with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4.

Layouts: ggml-common.h of ggml (block_q4_0 and on). In the sketches d and m are float16, q unsigned numbers of so many bits,
low halves of the bytes before the high ones. Each function: uint8 [blocks, bytes] -> float32 [blocks, 32].
"""
from __future__ import annotations

import torch
from torch import Tensor

from .fields import half_at, look_up, unpack

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""what the sixteen codes of IQ4_NL and IQ4_XS stand for"""
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""what the sixteen codes of MXFP4 stand for, times two (OCP Microscaling Formats 1.0, E2M1)"""


def q4_0(blocks: Tensor) -> Tensor:
    """d | 16 bytes of q4: d * (q - 8)"""
    return _nibbles(blocks, 2).float().sub_(8).mul_(half_at(blocks, 0))


def q4_1(blocks: Tensor) -> Tensor:
    """d | m | 16 bytes of q4: d * q + m"""
    return _nibbles(blocks, 4).float().mul_(half_at(blocks, 0)).add_(half_at(blocks, 2))


def q5_0(blocks: Tensor) -> Tensor:
    """d | 32 fifth bits | 16 bytes of q4: d * (q - 16)"""
    return _five_bits(blocks, 2).float().sub_(16).mul_(half_at(blocks, 0))


def q5_1(blocks: Tensor) -> Tensor:
    """d | m | 32 fifth bits | 16 bytes of q4: d * q + m"""
    return _five_bits(blocks, 4).float().mul_(half_at(blocks, 0)).add_(half_at(blocks, 2))


def q8_0(blocks: Tensor) -> Tensor:
    """d | 32 signed bytes q: d * q"""
    return blocks[:, 2:].view(torch.int8).float().mul_(half_at(blocks, 0))


def iq4_nl(blocks: Tensor) -> Tensor:
    """d | 16 bytes of q4: d * IQ4_VALUES[q]"""
    return look_up(_nibbles(blocks, 2), IQ4_VALUES).mul_(half_at(blocks, 0))


def mxfp4(blocks: Tensor) -> Tensor:
    """exponent e | 16 bytes of q4: 2^(e - 128) * E2M1_DOUBLED[q], the power being subnormal for e below 2"""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return look_up(_nibbles(blocks, 1), E2M1_DOUBLED).mul_(bits.view(torch.float32))


def _nibbles(blocks: Tensor, start: int) -> Tensor:
    """The 16 bytes from `start` as 32 numbers 0..15."""
    return unpack(blocks[:, start:start + 16], 4, 16).view(-1, 32)


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    """The fifth bits at `start` and the nibbles after them as 32 numbers 0..31."""
    fifth = unpack(blocks[:, start:start + 4], 1, 1).view(-1, 32)
    return _nibbles(blocks, start + 4) | fifth << 4

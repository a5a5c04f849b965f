"""GGML tensor types -> float32, in plain torch on any device.

Semantics: bit for bit what ggml's own dequantisation computes in float32: a block of type
Q8_0 is d * q, Q4_0 is d * (q - 8), Q4_1 is d * q + m, with d and m stored as float16.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


def _half_at(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as float32 [blocks, 1]."""
    return blocks[:, start:start + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor, start: int) -> Tensor:
    """The 16 bytes from `start` of every block as 32 numbers 0..15, low halves first: float32 [blocks, 32]."""
    packed = blocks[:, start:start + 16]
    out = torch.empty((blocks.shape[0], 32), dtype=torch.float32, device=blocks.device)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half_at(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks, 2).sub_(8).mul_(_half_at(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks, 4).mul_(_half_at(blocks, 0)).add_(_half_at(blocks, 2))


@dataclass(frozen=True)
class QuantType:
    """`dequantize`: uint8 [blocks, block_bytes], contiguous -> float32 [blocks, block_elements]."""

    block_elements: int
    block_bytes: int
    dequantize: Callable[[Tensor], Tensor]


QUANT_TYPES: dict[str, QuantType] = {
    "F32": QuantType(1, 4, _f32),
    "F16": QuantType(1, 2, _f16),
    "BF16": QuantType(1, 2, _bf16),
    "Q8_0": QuantType(32, 34, _q8_0),
    "Q4_0": QuantType(32, 18, _q4_0),
    "Q4_1": QuantType(32, 20, _q4_1),
}


def dequantize(data: Tensor, type_name: str) -> Tensor:
    """Packed bytes, uint8 [n * block_bytes], as float32 [n * block_elements] on the same device.

    Raises KeyError for a type that is not in QUANT_TYPES, ValueError for a torn block.
    """
    kind = QUANT_TYPES[type_name]
    if data.dtype != torch.uint8 or data.numel() % kind.block_bytes:
        raise ValueError(f"{type_name} comes in uint8 blocks of {kind.block_bytes} bytes, got {data.numel()} of {data.dtype}")
    return kind.dequantize(data.contiguous().view(-1, kind.block_bytes)).reshape(-1)

"""GGML tensor types -> float32, in plain torch on any device.

Semantics: bit for bit what ggml's own dequantisation computes in float32. A type is one entry of QUANT_TYPES.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .small_blocks import iq4_nl, mxfp4, q4_0, q4_1, q5_0, q5_1, q8_0
from .super_blocks import iq4_xs, q2_k, q3_k, q4_k, q5_k, q6_k


@dataclass(frozen=True)
class QuantType:
    """`dequantize`: uint8 [blocks, block_bytes], contiguous and little endian -> float32 [blocks, block_elements]."""

    block_elements: int
    block_bytes: int
    dequantize: Callable[[Tensor], Tensor]
    wide: tuple[tuple[int, int], ...]
    """(start, bytes) of every number of several bytes in a block: what a big-endian file has the other way round"""
    scales: tuple[int, ...]
    """the bytes at which its numbers of `scale` begin"""
    reach: int
    """no number of a block is further from 0 than this many times its largest scale"""
    scale: torch.dtype = torch.float16


QUANT_TYPES: dict[str, QuantType] = {
    "F32": QuantType(1, 4, lambda blocks: blocks.view(torch.float32), ((0, 4),), (0,), 1, torch.float32),
    "F16": QuantType(1, 2, lambda blocks: blocks.view(torch.float16).float(), ((0, 2),), (0,), 1),
    "BF16": QuantType(1, 2, lambda blocks: blocks.view(torch.bfloat16).float(), ((0, 2),), (0,), 1, torch.bfloat16),
    "Q4_0": QuantType(32, 18, q4_0, ((0, 2),), (0,), 8),
    "Q4_1": QuantType(32, 20, q4_1, ((0, 2), (2, 2)), (0, 2), 16),
    # ggml keeps the fifth bits of Q5_0 and Q5_1 as one number of the machine's own byte order
    "Q5_0": QuantType(32, 22, q5_0, ((0, 2), (2, 4)), (0,), 16),
    "Q5_1": QuantType(32, 24, q5_1, ((0, 2), (2, 2), (4, 4)), (0, 2), 32),
    "Q8_0": QuantType(32, 34, q8_0, ((0, 2),), (0,), 128),
    "Q2_K": QuantType(256, 84, q2_k, ((80, 2), (82, 2)), (80, 82), 60),
    "Q3_K": QuantType(256, 110, q3_k, ((108, 2),), (108,), 128),
    "Q4_K": QuantType(256, 144, q4_k, ((0, 2), (2, 2)), (0, 2), 1008),
    "Q5_K": QuantType(256, 176, q5_k, ((0, 2), (2, 2)), (0, 2), 2016),
    "Q6_K": QuantType(256, 210, q6_k, ((208, 2),), (208,), 4096),
    "IQ4_NL": QuantType(32, 18, iq4_nl, ((0, 2),), (0,), 127),
    "IQ4_XS": QuantType(256, 136, iq4_xs, ((0, 2), (2, 2)), (0,), 4064),
    "MXFP4": QuantType(32, 17, mxfp4, (), (0,), 6, torch.float8_e8m0fnu),
}


def dequantize(data: Tensor, type_name: str) -> Tensor:
    """Packed bytes, uint8 [n * block_bytes], as float32 [n * block_elements] on the same device.

    Raises KeyError for a type that is not in QUANT_TYPES, ValueError for a torn block.
    """
    return QUANT_TYPES[type_name].dequantize(_blocks(data.contiguous(), type_name)).reshape(-1)


def largest(data: Tensor, type_name: str) -> float:
    """An upper bound of the absolute numbers in packed bytes on the CPU, by their scales alone: NaN or infinite where one of these is.

    uint8 [n * block_bytes], contiguous, n > 0. Many times faster than to dequantise them.
    """
    kind = QUANT_TYPES[type_name]
    whole, magnitude = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}[kind.scale.itemsize]
    words = _blocks(data, type_name).view(whole)  # floats without their sign are in the order of their bits, NaN the last
    worst = max(int((words[:, start // kind.scale.itemsize] & magnitude).max()) for start in kind.scales)
    return kind.reach * torch.tensor([worst], dtype=whole).view(kind.scale).item()


def swap_byte_order_(data: Tensor, type_name: str) -> Tensor:
    """Packed bytes of the other byte order turned round in place: uint8 [n * block_bytes], contiguous. Raises as `dequantize`."""
    blocks = _blocks(data, type_name)
    for start, width in QUANT_TYPES[type_name].wide:
        blocks[:, start:start + width] = blocks[:, start:start + width].flip(1)
    return data


def _blocks(data: Tensor, type_name: str) -> Tensor:
    kind = QUANT_TYPES[type_name]
    if data.dtype != torch.uint8 or data.numel() % kind.block_bytes:
        raise ValueError(f"{type_name} comes in uint8 blocks of {kind.block_bytes} bytes, got {data.numel()} of {data.dtype}")
    return data.view(-1, kind.block_bytes)

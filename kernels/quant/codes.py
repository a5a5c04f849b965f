"""Types whose numbers are codes with a scale, and perhaps an offset, for every 16 or 32 of them: a number is scale * code + offset."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .fields import half_at, unpack
from .super_blocks import six_bit_pairs

Coded = tuple[Tensor, Tensor, Tensor | None]
"""codes [blocks, block_elements], scales and offsets float32 [blocks, block_elements / group]"""


@dataclass(frozen=True, slots=True)
class CodedType:
    """`codes`: uint8 [blocks, block_bytes], contiguous and little endian -> Coded."""

    bits: int
    """4: codes are uint8 of 0 to 15; 8: they are int8"""
    group: int
    offsets: bool
    codes: Callable[[Tensor], Coded]


def _q4_0(blocks: Tensor) -> Coded:
    scales = half_at(blocks, 0)
    return unpack(blocks[:, 2:], 4, 16).flatten(1), scales, -8 * scales


def _q4_1(blocks: Tensor) -> Coded:
    return unpack(blocks[:, 4:], 4, 16).flatten(1), half_at(blocks, 0), half_at(blocks, 2)


def _q5_0(blocks: Tensor) -> Coded:
    return (_five_bits(blocks, 2).view(torch.int8) - 16), half_at(blocks, 0), None


def _q5_1(blocks: Tensor) -> Coded:
    return _five_bits(blocks, 4).view(torch.int8), half_at(blocks, 0), half_at(blocks, 2)


def _q8_0(blocks: Tensor) -> Coded:
    return blocks[:, 2:].view(torch.int8), half_at(blocks, 0), None


def _q4_k(blocks: Tensor) -> Coded:
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    return unpack(blocks[:, 16:], 4, 32).flatten(1), scales * half_at(blocks, 0), -minima * half_at(blocks, 2)


def _q5_k(blocks: Tensor) -> Coded:
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    codes = unpack(blocks[:, 48:], 4, 32).reshape(-1, 8, 32) | unpack(blocks[:, 16:48], 1, 32).reshape(-1, 8, 32) << 4
    return codes.flatten(1).view(torch.int8), scales * half_at(blocks, 0), -minima * half_at(blocks, 2)


def _q6_k(blocks: Tensor) -> Coded:
    low, high = unpack(blocks[:, :128], 4, 64).reshape(-1, 256), unpack(blocks[:, 128:192], 2, 32).reshape(-1, 256)
    return (low | high << 4).view(torch.int8) - 32, blocks[:, 192:208].view(torch.int8).float() * half_at(blocks, 208), None


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    """The fifth bits at `start` and the nibbles after them: uint8 [blocks, 32] of 0 to 31."""
    fifth = unpack(blocks[:, start:start + 4], 1, 1).view(-1, 32)
    return unpack(blocks[:, start + 4:], 4, 16).view(-1, 32) | fifth << 4


CODED: dict[str, CodedType] = {
    "Q4_0": CodedType(4, 32, True, _q4_0), "Q4_1": CodedType(4, 32, True, _q4_1), "Q4_K": CodedType(4, 32, True, _q4_k),
    "Q5_0": CodedType(8, 32, False, _q5_0), "Q5_1": CodedType(8, 32, True, _q5_1), "Q5_K": CodedType(8, 32, True, _q5_k),
    "Q6_K": CodedType(8, 16, False, _q6_k), "Q8_0": CodedType(8, 32, False, _q8_0),
}


def coded_rows(data: Tensor, type_name: str, block_bytes: int) -> Coded:
    """Rows of blocks, uint8 [rows, bytes of a row]: codes [rows, d_in], scales and offsets [rows, d_in / group]."""
    rows = data.shape[0]
    codes, scales, offsets = CODED[type_name].codes(data.reshape(-1, block_bytes))
    return codes.reshape(rows, -1), scales.reshape(rows, -1), None if offsets is None else offsets.reshape(rows, -1)

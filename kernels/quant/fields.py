"""Reading the parts of quantised blocks: uint8 [blocks, block_bytes] -> the numbers in them. Every function runs on any device."""
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def half_at(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as float32 [blocks, 1]."""
    return blocks[:, start:start + 2].contiguous().view(torch.float16).float()


def unpack(packed: Tensor, bits: int, group: int) -> Tensor:
    """Small numbers out of bytes, uint8 [blocks, bytes] -> uint8 [blocks, bytes / group, 8 / bits, group].

    Each run of `group` bytes is read for the lowest `bits` of every byte, then for the next ones, and so on: as ggml orders them.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return (packed.reshape(packed.shape[0], packed.shape[1] // group, 1, group) >> shifts) & ((1 << bits) - 1)


def look_up(indices: Tensor, values: tuple[int, ...]) -> Tensor:
    """`values[i]` as float32, in the shape of `indices`."""
    return _table(values, indices.device)[indices.int()]


@cache
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)

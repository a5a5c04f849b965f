"""Blocks of 256 elements whose sub-blocks have small scales of their own: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS.

Layouts: ggml-common.h of ggml (block_q2_K and on). d and dmin are float16; s and m are a sub-block's scale and minimum.
Each function: uint8 [blocks, bytes] -> float32 [blocks, 256]. The order of the products is ggml's, so that they round alike.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .fields import half_at, look_up, unpack
from .small_blocks import IQ4_VALUES


def q2_k(blocks: Tensor) -> Tensor:
    """16 bytes (m4 s4) | 64 bytes of q2 | d | dmin: (d s) q - (dmin m), sub-blocks of 16"""
    scales = blocks[:, :16]
    q = unpack(blocks[:, 16:80], 2, 32).reshape(-1, 16, 16).float()
    return _scaled(q, half_at(blocks, 80) * (scales & 15), half_at(blocks, 82) * (scales >> 4))


def q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of third bits | 64 bytes of q2 | 12 bytes of s6 | d: (d (s - 32)) (q - 4), sub-blocks of 16"""
    low = unpack(blocks[:, 96:104], 4, 8).reshape(-1, 16)
    high = unpack(blocks[:, 104:108], 2, 4).reshape(-1, 16)
    scales = (low | high << 4).float().sub_(32).mul_(half_at(blocks, 108))
    third = unpack(blocks[:, :32], 1, 32).reshape(-1, 16, 16)
    q = unpack(blocks[:, 32:96], 2, 32).reshape(-1, 16, 16) | third << 2
    return _scaled(q.float().sub_(4), scales)


def q4_k(blocks: Tensor) -> Tensor:
    """d | dmin | 12 bytes of s6 and m6 | 128 bytes of q4: (d s) q - (dmin m), sub-blocks of 32"""
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    q = unpack(blocks[:, 16:144], 4, 32).reshape(-1, 8, 32).float()
    return _scaled(q, scales * half_at(blocks, 0), minima * half_at(blocks, 2))


def q5_k(blocks: Tensor) -> Tensor:
    """d | dmin | 12 bytes of s6 and m6 | 32 bytes of fifth bits | 128 bytes of q4: (d s) q - (dmin m), sub-blocks of 32"""
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    fifth = unpack(blocks[:, 16:48], 1, 32).reshape(-1, 8, 32)
    q = unpack(blocks[:, 48:176], 4, 32).reshape(-1, 8, 32) | fifth << 4
    return _scaled(q.float(), scales * half_at(blocks, 0), minima * half_at(blocks, 2))


def q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of q4 | 64 bytes of the two bits above | 16 signed bytes s | d: (d s) (q - 32), sub-blocks of 16"""
    low = unpack(blocks[:, :128], 4, 64).reshape(-1, 16, 16)
    high = unpack(blocks[:, 128:192], 2, 32).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(half_at(blocks, 208))
    return _scaled((low | high << 4).float().sub_(32), scales)


def iq4_xs(blocks: Tensor) -> Tensor:
    """d | 16 bits of s high | 4 bytes of s low | 128 bytes of q4: (d (s - 32)) IQ4_VALUES[q], sub-blocks of 32"""
    high = unpack(blocks[:, 2:4], 2, 1).reshape(-1, 8)
    low = unpack(blocks[:, 4:8], 4, 1).reshape(-1, 8)
    scales = (low | high << 4).float().sub_(32).mul_(half_at(blocks, 0))
    return _scaled(look_up(unpack(blocks[:, 8:136], 4, 16).reshape(-1, 8, 32), IQ4_VALUES), scales)


def six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits out of 12 bytes, each float32 [blocks, 8].

    The first four of both lie in the low six bits of bytes 0-3 and 4-7; the other four have their low halves in
    bytes 8-11 and their upper two bits on top of the first ones.
    """
    s, m, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((s & 63, both & 15 | s >> 2 & 48), 1)
    minima = torch.cat((m & 63, both >> 4 | m >> 2 & 48), 1)
    return scales.float(), minima.float()


def _scaled(q: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """scales * q - minima: q [blocks, subs, n] in place, scales and minima [blocks, subs] -> [blocks, subs * n]."""
    q.mul_(scales.unsqueeze(-1))
    if minima is not None:
        q.sub_(minima.unsqueeze(-1))
    return q.flatten(1)

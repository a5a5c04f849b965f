"""Rotary positions in the half-rotation layout: dimension i turns with dimension i + d/2."""
from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """[head_dim / 2] float64: theta^(-2i / head_dim)."""
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def llama3_frequencies(inverse: Tensor, factor: float, low: float, high: float, trained_context: int) -> Tensor:
    """Semantics: wavelengths over trained_context / low are stretched by `factor`, those under trained_context / high stay,
    between them the two are blended linearly in trained_context / wavelength."""
    turns = trained_context * inverse / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * (blend + (1.0 - blend) / factor)


def rope_table(inverse: Tensor, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [positions, 2 * len(inverse)]; the first half of sin is negated, ready for `rope_`."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return table[0].to(device, dtype), table[1].to(device, dtype)


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Semantics: x = x * cos + swap_halves(x) * sin, in place.

    x: [tokens, heads, d], a view is fine; cos, sin: [tokens, 1, d] rows of `rope_table`. 16-bit x is turned in the table's dtype.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    if x.dtype == cos.dtype:
        torch.addcmul(x * cos, swapped, sin, out=x)
    else:
        x.copy_(torch.addcmul(x * cos, swapped, sin))

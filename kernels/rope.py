"""Rotary positions in the half-rotation layout: dimension i turns with dimension i + d/2."""
from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_frequencies(rotary: int, theta: float) -> Tensor:
    """[rotary / 2] float64: theta^(-2i / rotary)."""
    return theta ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)


def llama3_frequencies(inverse: Tensor, factor: float, low: float, high: float, trained_context: int) -> Tensor:
    """Semantics: wavelengths over trained_context / low are stretched by `factor`, those under trained_context / high stay,
    between them the two are blended linearly in trained_context / wavelength."""
    turns = trained_context * inverse / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * (blend + (1.0 - blend) / factor)


def yarn_frequencies(
    inverse: Tensor, theta: float, factor: float, trained_context: int, beta_fast: float, beta_slow: float, truncate: bool,
) -> Tensor:
    """Semantics: dimensions that turn more than `beta_fast` times over `trained_context` tokens stay, those that turn less than
    `beta_slow` times are stretched by `factor`, between them the two are blended linearly in the dimension; with `truncate` the
    borders are whole dimensions.  (YaRN, arXiv 2309.00071, in the form of transformers.)"""
    rotary = 2 * inverse.numel()

    def dimension(turns: float) -> float:
        return rotary * math.log(trained_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(inverse.numel(), dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * (1.0 - stretched) + inverse / factor * stretched


def rope_table(inverse: Tensor, positions: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(cos, sin) times `scale`, each [positions, 2 * len(inverse)]; the first half of sin is negated, ready for `rope_`."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse)
    cos, sin = angles.cos() * scale, angles.sin() * scale
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

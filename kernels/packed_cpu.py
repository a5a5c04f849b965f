"""A packed matrix on a CPU that has products for it: its rows brought once into the order that these read."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .packed import PackedWeight

if TYPE_CHECKING:
    from .cpu.coded_rows import CodedRows


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """[rows, d_in], as `parts` one under the other; `dtype` is that of the model."""

    parts: tuple[CodedRows | PackedWeight, ...]
    """the latter of types that have no codes"""
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Semantics: y[t, o] = sum_i x[t, i] weight[o, i] + bias[o].  x [T, d_in], y [T, rows], in the dtype of x."""
        products = [part.linear(x) for part in self.parts]
        y = (products[0] if len(products) == 1 else torch.cat(products, 1)).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y [T, d_in] in `dtype`."""
        picked, first = None, 0
        for part in self.parts:
            found = part.rows((ids - first).clamp(0, part.shape[0] - 1)).to(self.dtype)
            picked = found if picked is None else torch.where((ids >= first).unsqueeze(1), found, picked)
            first += part.shape[0]
        return picked

    def chunks(self, dtype: torch.dtype, elements: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, [n, d_in] of `dtype`) over all rows, about `elements` numbers at a time; each a copy."""
        before = 0
        for part in self.parts:
            for first, numbers in part.chunks(dtype, elements) if isinstance(part, PackedWeight) else part.chunks(elements):
                yield before + first, numbers.to(dtype)
            before += part.shape[0]


def multiplies_packed() -> bool:
    """Whether the CPU has products of packed numbers that are worth it."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def packed_for_cpu(weight: PackedWeight) -> CpuWeight | None:
    """`weight` in the order of the CPU's products; None where these know none of its types."""
    if not multiplies_packed():
        return None
    from .cpu.coded_rows import code_rows  # it brings numba, which nobody else needs
    parts = tuple(code_rows(rows) or replace(weight, parts=(rows,)) for rows in weight.parts)
    return None if all(isinstance(part, PackedWeight) for part in parts) else CpuWeight(parts, weight.dtype)

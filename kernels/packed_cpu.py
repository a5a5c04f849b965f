"""A packed matrix on a CPU that has products for it: its rows brought once into the order that these read."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .int4_rows import Int4Rows, pack_int4, takes_int4
from .int8_rows import Int8Rows, pack_int8, takes_int8
from .packed import PackedRows, PackedWeight

Part = Int4Rows | Int8Rows | PackedWeight
"""the last of types that no product here knows, in which nothing is rounded"""


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """[rows, d_in], as `parts` one under the other; `dtype` is that of the model. Products and numbers are rounded as the parts say."""

    parts: tuple[Part, ...]
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
        y = self.product(x).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def product(self, x: Tensor) -> Tensor:
        """`linear` without a bias, in bf16 or fp32, as it comes: nothing is converted in vain.  x fp32 or bf16."""
        if len(self.parts) == 1:
            return self.parts[0].linear(x)
        return torch.cat([part.linear(x) for part in self.parts], 1)

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
    parts = [_part(rows, weight) for rows in weight.parts] if multiplies_packed() else [weight]
    return None if all(isinstance(part, PackedWeight) for part in parts) else CpuWeight(tuple(parts), weight.dtype)


def _part(rows: PackedRows, weight: PackedWeight) -> Part:
    kept = replace(weight, parts=(rows,))
    if takes_int4(rows.type, *kept.shape):
        return pack_int4(rows.data, rows.type)
    return (pack_int8(kept) if takes_int8(rows.type, *kept.shape) else None) or kept

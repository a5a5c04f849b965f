"""A packed matrix on a GPU: its rows repacked once, and what others than a decode step ask of it."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .packed import PackedRows, PackedWeight
from .repack import ORDERS, RepackedRows, repack
from .unpack_rows import unpack_rows

MOST_PARTS = 3
CHUNK_ELEMENTS = 1 << 27
"""that become numbers at once: all of a layer's matrix, lest its product is cut into pieces that do not fill a GPU"""


@dataclass(frozen=True, slots=True)
class RepackedWeight:
    """[rows, d_in], as `parts` one under the other; `dtype` is that of the model.

    `gated`: the rows lie as a gate reads them, 2 i is row i and 2 i + 1 is row rows / 2 + i. Only how they lie: what is handed out and
    taken counts rows as the matrix does.
    """

    parts: tuple[RepackedRows, ...]
    dtype: torch.dtype
    gated: bool

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.parts[0].d_in

    @property
    def device(self) -> torch.device:
        return self.parts[0].data.device

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)

    def rows(self, ids: Tensor) -> Tensor:
        """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y [T, d_in] in `dtype`."""
        return self._numbers(ids, self.dtype)

    def chunks(self, dtype: torch.dtype, elements: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, [n, d_in] of `dtype`) over all rows, about `elements` numbers at a time."""
        rows, d_in = self.shape
        step = max(1, elements // d_in)
        for first in range(0, rows, step):
            yield first, self._numbers(torch.arange(first, min(first + step, rows), device=self.device), dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Semantics: y[t, o] = sum_i x[t, i] weight[o, i] + bias[o].  x [T, d_in], y [T, rows], in the dtype of x."""
        y = x.new_empty((x.shape[0], self.shape[0]))
        for first, weight in self.chunks(x.dtype, CHUNK_ELEMENTS):
            torch.mm(x, weight.t(), out=y[:, first:first + weight.shape[0]])
        return y if bias is None else y.add_(bias)

    def _numbers(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        half = self.shape[0] // 2
        ids = torch.where(ids < half, 2 * ids, 2 * (ids - half) + 1) if self.gated else ids
        picked, first = None, 0
        for part in self.parts:
            found = torch.empty(len(ids), part.d_in, dtype=dtype, device=self.device)
            unpack_rows(part, (ids - first).clamp(0, part.rows - 1) if len(self.parts) > 1 else ids, found)
            picked = found if picked is None else torch.where((ids >= first).unsqueeze(1), found, picked)
            first += part.rows
        return picked


def repacked(weight: PackedWeight, gated: bool = False) -> RepackedWeight | None:
    """`weight` as tensor cores read it; None where it has a type without an order here, or too many types one under the other, and where
    the model's numbers have 32 bits, which tensor cores do not take.

    `gated`: its upper half is a gate, its lower half what the gate opens.
    """
    if weight.dtype.itemsize != 2:
        return None
    parts: list[PackedRows] = []
    for part in weight.parts:
        if part.type not in ORDERS:
            return None
        if parts and parts[-1].type == part.type:
            parts[-1] = PackedRows(part.type, torch.cat((parts[-1].data, part.data)))
        else:
            parts.append(part)
    if len(parts) > (1 if gated else MOST_PARTS):
        return None
    order = torch.arange(weight.shape[0], device=weight.device).view(2, -1).T.flatten() if gated else None
    return RepackedWeight(tuple(repack(part, order) for part in parts), weight.dtype, gated)

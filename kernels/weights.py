"""The matrices of a base, however they lie in memory: products with them, their rows, their parts."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Weight = Tensor
"""[rows, d_in]"""
CHUNK_ELEMENTS = 1 << 22
"""of the fp32 copies that `row_chunks` hands out"""


def base_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Semantics: y[t, o] = sum_i x[t, i] weight[o, i] + bias[o].  x [T, d_in], y [T, rows], of one dtype."""
    return F.linear(x, weight, bias)


def rows(weight: Weight, ids: Tensor) -> Tensor:
    """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y [T, d_in] in the dtype of the model."""
    return F.embedding(ids, weight)


def concat_rows(parts: Sequence[Weight]) -> Weight:
    """The parts one under the other; one part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def row_chunks(weight: Weight) -> Iterator[tuple[int, Tensor]]:
    """(first row, fp32 [n, d_in]) over all rows, a few million elements at a time."""
    count = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for first in range(0, weight.shape[0], count):
        yield first, weight[first:first + count].float()

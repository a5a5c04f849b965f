"""The matrices of a base, however they lie in memory: products with them, their rows, their parts."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed import PackedWeight, packed_concat
from .packed_cpu import CpuWeight, packed_for_cpu
from .repacked import RepackedWeight, repacked
from .triton_compat import HAS_TRITON

Weight = Tensor | PackedWeight | RepackedWeight | CpuWeight
"""[rows, d_in]; all have shape, dtype (the model's), device and nbytes"""
CHUNK_ELEMENTS = 1 << 22
"""of the fp32 copies that `row_chunks` hands out"""


def base_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Semantics: y[t, o] = sum_i x[t, i] weight[o, i] + bias[o].  x [T, d_in], y [T, rows], of one dtype."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.linear(x, bias)


def rows(weight: Weight, ids: Tensor) -> Tensor:
    """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y [T, d_in] in the dtype of the model."""
    return F.embedding(ids, weight) if isinstance(weight, Tensor) else weight.rows(ids)


def concat_rows(parts: Sequence[Weight]) -> Weight:
    """The parts one under the other, packed if one of them is; one part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return packed_concat(list(parts)) if any(isinstance(part, PackedWeight) for part in parts) else torch.cat(list(parts))


def laid_out(weight: Weight, gated: bool = False) -> Weight:
    """`weight` as its device reads it best: packed rows are repacked once, on a CUDA device where they are of types that kernels know, on
    a CPU where that is asked for (`recoded`).

    `gated`: its upper half is a gate for the lower one.
    """
    if isinstance(weight, PackedWeight) and weight.device.type == "cuda" and HAS_TRITON:
        return repacked(weight, gated) or weight
    if isinstance(weight, PackedWeight) and weight.device.type == "cpu" and weight.recoded:
        return packed_for_cpu(weight) or weight
    return weight


def row_chunks(weight: Weight) -> Iterator[tuple[int, Tensor]]:
    """(first row, fp32 [n, d_in]) over all rows, a few million elements at a time."""
    if not isinstance(weight, Tensor):
        yield from weight.chunks(torch.float32, CHUNK_ELEMENTS)
        return
    count = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for first in range(0, weight.shape[0], count):
        yield first, weight[first:first + count].float()

"""Attention of one row on a CPU over keys and values where they lie: run by run of its blocks, without a copy of them."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .spans import Span


@dataclass(frozen=True, slots=True)
class StoredRuns:
    """What a row looks at, in all layers: for each run the keys and the values, [1, kv_heads, tokens, d] by layer."""

    runs: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]
    scale: float | None

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """Semantics: softmax(q k^T scale) v over all runs.  q [1, kv_heads, heads / kv_heads, d] fp32, and so the result."""
        parts = [torch._scaled_dot_product_flash_attention_for_cpu(q, keys[layer], values[layer], scale=self.scale)
                 for keys, values in self.runs]
        if len(parts) == 1:
            return parts[0][0]
        shares = torch.stack([log_sum for _, log_sum in parts]).softmax(0).unsqueeze(4)
        return torch.stack([out for out, _ in parts]).mul_(shares).sum(0)


def stored_runs(span: Span, caches: Tensor, scale: float | None = None) -> StoredRuns:
    """For a span of one row. `caches` [layers, 2, kv_heads, blocks, block_tokens, d]."""
    layers, _, kv_heads, _, block, d = caches.shape
    cells = caches.view(layers, 2, 1, kv_heads, -1, d)
    runs, left = [], span.length
    for first, count in span.runs:
        keys, values = cells.narrow(4, first * block, min(count * block, left)).unbind(1)
        runs.append((keys.unbind(0), values.unbind(0)))
        left -= count * block
    return StoredRuns(runs, scale)


FEW_ROWS = 4
"""up to which a copy for each takes less than to find them all by their cells"""


@dataclass(frozen=True, slots=True)
class KvTargets:
    """Where the keys and values of a step go, by layer: the cells of each row, [2 * kv_heads, d], or all cells and which of them."""

    rows: Sequence[Sequence[Tensor]]
    all_cells: Sequence[Tensor]
    cells: Tensor

    def write_(self, layer: int, kv: Tensor, kv_rows: Sequence[Tensor]) -> None:
        """kv [2 * kv_heads, rows, d], the keys' heads first; `kv_rows`: its rows."""
        if not self.rows:
            self.all_cells[layer].index_copy_(1, self.cells, kv)
        for row, target in zip(kv_rows, self.rows, strict=False):
            target[layer].copy_(row)


def kv_targets(caches: Tensor, cells: Tensor) -> KvTargets:
    """`caches` [layers, 2, kv_heads, blocks, block_tokens, d]; `cells` [rows] int64."""
    layers, _, kv_heads, _, _, d = caches.shape
    whole = caches.view(layers, 2 * kv_heads, -1, d)
    few = [whole[:, :, cell].unbind(0) for cell in cells.tolist()] if cells.shape[0] <= FEW_ROWS else []
    return KvTargets(few, whole.unbind(0), cells)

"""One step as tensors: what the decoder reads."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention import Span
from ..kernels.uploads import uploaded
from .blocks import BlockTable


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request that a step computes."""

    ids: Sequence[int]
    position: int
    """of the first of them; as many tokens are in the cache already"""
    table: BlockTable
    sampled: bool
    """the logits of its last token are wanted"""
    every: bool = False
    """the logits of all its tokens are wanted"""
    rope_start: int = 0
    """the row of the RoPE tables where the request's position 0 lies (RopeTables.start)"""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """tokens = all chunks' tokens, end to end."""

    ids: Tensor
    """[tokens] int64"""
    rope_rows: Tensor
    """[tokens] int64: each token's row of the RoPE tables, its position unless the request turns by longrope's long factors"""
    cells: Tensor
    """[tokens] int64: which cell of the cache each token's keys and values go to"""
    spans: tuple[Span, ...]
    sampled: Tensor
    """[rows] int64: the tokens whose logits are wanted, in chunk order"""


def step_inputs(chunks: Sequence[Chunk], device: torch.device) -> StepInputs:
    """The tensors of a step over `chunks` (at least one, each with at least one token)."""
    tokens = sum(len(chunk.ids) for chunk in chunks)
    rows = np.empty((3, tokens), np.int64)
    sampled: list[int] = []
    spans: list[Span] = []
    start = 0
    for chunk in chunks:
        count = len(chunk.ids)
        end, length = start + count, chunk.position + count
        rows[0, start:end] = chunk.ids
        rows[1, start:end] = np.arange(chunk.position + chunk.rope_start, length + chunk.rope_start)
        rows[2, start:end] = chunk.table.cells(chunk.position, length)
        spans.append(Span(start, count, length, chunk.table.runs(length)))
        if chunk.every:
            sampled += range(start, end)
        elif chunk.sampled:
            sampled.append(end - 1)
        start = end
    packed = uploaded(np.concatenate((rows.ravel(), np.array(sampled, np.int64))), device)
    return StepInputs(*packed[: 3 * tokens].view(3, -1), tuple(spans), packed[3 * tokens :])

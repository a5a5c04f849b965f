"""One step as tensors: what the decoder reads."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.attention import Span
from .blocks import BLOCK_TOKENS, BlockTable


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
    ids: list[int] = []
    rope_rows: list[int] = []
    cells: list[int] = []
    sampled: list[int] = []
    spans: list[Span] = []
    for chunk in chunks:
        length = chunk.position + len(chunk.ids)
        spans.append(Span(len(ids), len(chunk.ids), length, chunk.table.runs(length)))
        ids += chunk.ids
        rope_rows += range(chunk.position + chunk.rope_start, length + chunk.rope_start)
        cells += _cells(chunk.table, chunk.position, length)
        if chunk.every:
            sampled += range(len(ids) - len(chunk.ids), len(ids))
        elif chunk.sampled:
            sampled.append(len(ids) - 1)
    packed = torch.tensor(ids + rope_rows + cells + sampled, dtype=torch.int64).to(device)
    return StepInputs(*packed[: 3 * len(ids)].view(3, -1), tuple(spans), packed[3 * len(ids) :])


def _cells(table: BlockTable, position: int, end: int) -> list[int]:
    """The cells of the tokens from `position` up to `end`, a block at a time."""
    cells: list[int] = []
    while position < end:
        count = min(end - position, BLOCK_TOKENS - position % BLOCK_TOKENS)
        first = table.cell(position)
        cells += range(first, first + count)
        position += count
    return cells

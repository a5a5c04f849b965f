"""The best token of each row, in two launches that wait for nothing: what a graph can hold."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
import torch
from torch import Tensor

from .triton_compat import runs_triton, tl, triton

PARTS = 64
"""programs that share a row"""


class GreedyWork:
    """What the programs of a row leave for the last launch; for steps of up to `rows` rows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.values = torch.empty(rows, PARTS, dtype=torch.float32, device=device)
        self.places = torch.empty(rows, PARTS, dtype=torch.int32, device=device)


def greedy(logits: Tensor, tokens: Tensor, work: GreedyWork) -> None:
    """Semantics: tokens[t] = argmax logits[t], the first of equal ones; -1 where a logit of the row is not finite.

    logits [rows, vocab], any float dtype; tokens [rows] int64.
    """
    if not runs_triton(logits):
        tokens.copy_(torch.where(torch.isfinite(logits).all(-1), logits.argmax(-1), -1))
        return
    rows, vocab = logits.shape
    share = -(-vocab // PARTS)
    block = min(4096, max(128, triton.next_power_of_2(share)))
    _part[(rows, PARTS)](logits, work.values, work.places, logits.stride(0), vocab, share, PARTS, block, num_warps=4)
    _join[(rows,)](work.values, work.places, tokens, PARTS, num_warps=1)


@triton.jit
def _part(logits, values, places, row_step, vocab, share, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    offset = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    end = tl.minimum(vocab, (part + 1) * share)
    for first in range(part * share, end, BLOCK):
        at = first + offset
        x = tl.load(logits + row.to(tl.int64) * row_step + at, mask=at < end, other=float("-inf")).to(tl.float32)
        bad |= ((x - x != 0.0) & (at < end)).to(tl.int32)
        better = x > most
        most = tl.where(better, x, most)
        place = tl.where(better, at, place)
    best = tl.max(most, 0)
    first_best = tl.min(tl.where(most == best, place, vocab), 0)
    tl.store(values + row * PARTS + part, best)
    tl.store(places + row * PARTS + part, tl.where(tl.max(bad, 0) != 0, -1, first_best))


@triton.jit
def _join(values, places, tokens, PARTS: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    value = tl.load(values + row * PARTS + part)
    place = tl.load(places + row * PARTS + part)
    best = tl.min(tl.where(value == tl.max(value, 0), place, 2147483647), 0)
    tl.store(tokens + row, tl.where(tl.min(place, 0) < 0, -1, best).to(tl.int64))

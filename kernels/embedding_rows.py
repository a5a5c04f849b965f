"""Rows of an embedding that single rows of a decode step have of their own: replaced, with what LoRA adds to them, brought to lengths."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .triton_compat import runs_triton, tl, triton

MOST_TERMS = 8
TERM_WORDS = 5
"""int64: which of KINDS, two addresses, rank, weight as fp64"""
EMBEDDING_WORDS = 1 + MOST_TERMS * TERM_WORDS
"""int64 of a row: how many terms, then these"""
KINDS = {"row": 1, "lora": 2, "gains": 3}
BLOCK, STEP = 128, 16


@dataclass(frozen=True, slots=True)
class Term:
    """What is done next to x, which begins with 0. "row": x += weight * matrix[index]; "lora": x += weight * matrix[index] b;
    "gains": x *= matrix."""

    kind: Literal["row", "lora", "gains"]
    matrix: Tensor
    """[rows, hidden]; [tokens, r]; fp32 [hidden]. Contiguous"""
    index: int = 0
    b: Tensor | None = None
    """[r, hidden], contiguous"""
    weight: float = 1.0


class EmbeddingRows:
    """The terms of up to as many rows as `host` has, at most MOST_TERMS each.

    `host` [rows, EMBEDDING_WORDS] int64 is memory of the caller, who uploads it to `device` between `set` and what `run` launches; both
    stay at their addresses.
    """

    def __init__(self, host: np.ndarray, device: Tensor) -> None:
        self._host, self._weights, self._device = host, host.view(np.float64), device
        self._terms: Sequence[Sequence[Term]] = ()

    def set(self, terms: Sequence[Sequence[Term]]) -> None:
        """Those of the first rows; a row without any is not written by `run`. What they hold must stay until the step is over."""
        self._host[:, 0] = 0
        for row, own in enumerate(terms):
            self._host[row, 0] = len(own)
            for place, term in enumerate(own):
                at, matrix, b = 1 + place * TERM_WORDS, term.matrix, term.b
                address = matrix.data_ptr() + (term.index * matrix.shape[1] * matrix.itemsize if matrix.dim() == 2 else 0)
                self._host[row, at : at + 4] = KINDS[term.kind], address, 0 if b is None else b.data_ptr(), 0 if b is None else len(b)
                self._weights[row, at + 4] = term.weight
        self._terms = terms

    def run(self, out: Tensor) -> None:
        """Semantics: out[row] = x behind all terms of the row, summed in fp32.  out [rows, hidden] in the dtype of rows, A and B."""
        if not runs_triton(out):
            for row, own in enumerate(self._terms):
                if own:
                    out[row] = _applied(own, out.shape[1])
            return
        rows, hidden = out.shape
        _embedding_rows[(rows, triton.cdiv(hidden, BLOCK))](self._device, out, hidden, EMBEDDING_WORDS, TERM_WORDS, BLOCK, STEP)


def _applied(terms: Sequence[Term], hidden: int) -> Tensor:
    x = torch.zeros(hidden, device=terms[0].matrix.device)
    for term in terms:
        if term.kind == "gains":
            x = x * term.matrix
        else:
            row = term.matrix[term.index].float() * term.weight
            x = x + (row if term.b is None else row @ term.b.float())
    return x


@triton.jit
def _embedding_rows(
    words, out, HIDDEN: tl.constexpr, WORDS: tl.constexpr, TERM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):
    row = tl.program_id(0)
    own = words + row * WORDS
    count = tl.load(own).to(tl.int32)
    if count > 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < HIDDEN
        x = tl.zeros((BLOCK,), tl.float32)
        for number in range(0, count):
            term = own + 1 + number * TERM
            kind = tl.load(term)
            weight = tl.load(term + 4).to(tl.float64, bitcast=True).to(tl.float32)
            numbers = tl.load(term + 1).to(tl.pointer_type(out.dtype.element_ty))
            if kind == 1:
                x += weight * tl.load(numbers + place, mask=inside, other=0.0).to(tl.float32)
            elif kind == 2:
                b, rank = tl.load(term + 2).to(tl.pointer_type(out.dtype.element_ty)), tl.load(term + 3).to(tl.int32)
                for first in range(0, rank, STEP):
                    r = first + tl.arange(0, STEP)
                    h = weight * tl.load(numbers + r, mask=r < rank, other=0.0).to(tl.float32)
                    at = b + r[:, None] * HIDDEN + place[None, :]
                    part = tl.load(at, mask=(r < rank)[:, None] & inside[None, :], other=0.0).to(tl.float32)
                    x += tl.sum(part * h[:, None], 0)
            else:
                gains = tl.load(term + 1).to(tl.pointer_type(tl.float32))
                x *= tl.load(gains + place, mask=inside, other=0.0)
        tl.store(out + row.to(tl.int64) * HIDDEN + place, x.to(out.dtype.element_ty), mask=inside)

"""Rows of a head that single rows of a decode step have of their own: trained, or behind those of the base."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .decode_linear import RowSquares
from .triton_compat import INTERPRETED, runs_triton, tl, triton

HEAD_WORDS = 5
"""int64 of a row: addresses of `numbers` and `ids` (0: none), rows; `kept` and `share` as fp64"""
PROGRAMS = 1 if INTERPRETED else 128
"""of each row of the step"""


@dataclass(frozen=True, slots=True)
class HeadPart:
    """What one adapter has."""

    numbers: Tensor
    """[n, hidden], contiguous"""
    ids: Tensor | None
    """int64 [n], ascending; None where row i is that of token i"""
    kept: float
    """what remains of the base's logit of a token that the base has"""
    share: float
    """of these rows there; a token that the base lacks has its row whole"""


class HeadRows:
    """The parts of up to as many rows as `host` has.

    `host` [rows, HEAD_WORDS] int64 is memory of the caller, who uploads it to `device` between `set` and what `run` launches; both stay at
    their addresses.
    """

    def __init__(self, host: np.ndarray, device: Tensor, base_rows: int) -> None:
        self._host, self._floats, self._device, self._base_rows = host, host.view(np.float64), device, base_rows
        self._parts: Sequence[HeadPart | None] = ()

    def set(self, parts: Sequence[HeadPart | None]) -> None:
        """Those of the first rows; the others have none. What they hold must stay until the step is over."""
        self._host[:] = 0
        for row, part in enumerate(parts):
            if part is not None:
                self._host[row, :3] = (part.numbers.data_ptr(), part.ids.data_ptr() if part.ids is not None else 0, len(part.numbers))
                self._floats[row, 3:] = part.kept, part.share
        self._parts = parts

    def run_(self, x: Tensor, norm: RowSquares | None, logits: Tensor) -> None:
        """Semantics, for rows with a part: z = numbers x / rms; logits[ids] = kept * logits[ids] + share * z for the base's tokens,
        logits[ids] = z for others, 0 for others that are not among `ids`. 1 / rms as in `decode_linear`; in fp32.

        x [rows, hidden] in the dtype of `numbers`; logits [rows, columns], of which the base has made the first `base_rows`. May be
        captured.
        """
        logits[:, self._base_rows :].zero_()
        if not runs_triton(x):
            self._run_reference_(x, norm, logits)
            return
        rows, hidden = x.shape
        depth = min(512, triton.next_power_of_2(hidden))
        _head_rows[(rows, PROGRAMS)](
            x, norm and norm.parts, logits, self._device, logits.stride(0), norm.parts.stride(0) if norm else 0, self._base_rows,
            norm.width if norm else 1, norm.eps if norm else 0.0, PARTS=norm.parts.shape[0] if norm else 0,
            PARTS_BLOCK=triton.next_power_of_2(norm.parts.shape[0]) if norm else 1, HIDDEN=hidden, BN=16, BK=depth, WORDS=HEAD_WORDS,
            PROGRAMS=PROGRAMS)

    def _run_reference_(self, x: Tensor, norm: RowSquares | None, logits: Tensor) -> None:
        for row, part in enumerate(self._parts):
            if part is None:
                continue
            z = part.numbers.float() @ x[row].float()
            if norm is not None:
                z *= torch.rsqrt(norm.parts[:, row].sum() / norm.width + norm.eps)
            ids = torch.arange(len(z), device=x.device) if part.ids is None else part.ids
            known = ids < self._base_rows
            logits[row, ids] = (torch.where(known, part.kept * logits[row, ids].float() + part.share * z, z)).to(logits.dtype)


@triton.jit
def _head_rows(
    x, parts, logits, words, logits_row, parts_row, base_rows, width, eps, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WORDS: tl.constexpr, PROGRAMS: tl.constexpr,
):
    row = tl.program_id(0)
    own = words + row * WORDS
    count = tl.load(own + 2).to(tl.int32)
    if tl.program_id(1) * BN < count:
        numbers = tl.load(own).to(tl.pointer_type(x.dtype.element_ty))
        named = tl.load(own + 1)
        ids = named.to(tl.pointer_type(tl.int64))
        kept = tl.load(own + 3).to(tl.float64, bitcast=True).to(tl.float32)
        share = tl.load(own + 4).to(tl.float64, bitcast=True).to(tl.float32)
        inverse = 1.0
        if parts is not None:
            part = tl.arange(0, PARTS_BLOCK)
            squares = tl.sum(tl.load(parts + part * parts_row + row, mask=part < PARTS, other=0.0), 0)
            inverse = tl.rsqrt(squares / width + eps)
        for first in range(tl.program_id(1) * BN, count, PROGRAMS * BN):
            n = first + tl.arange(0, BN)
            inside = n < count
            sums = tl.zeros((BN, BK), tl.float32)
            for k in range(0, HIDDEN, BK):
                depth = k + tl.arange(0, BK)
                there = depth < HIDDEN
                inputs = tl.load(x + row.to(tl.int64) * HIDDEN + depth, mask=there, other=0.0).to(tl.float32)
                place = numbers + n.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
                sums += tl.load(place, mask=inside[:, None] & there[None, :], other=0.0).to(tl.float32) * inputs[None, :]
            z = tl.sum(sums, 1) * inverse
            token = n.to(tl.int64)
            if named != 0:
                token = tl.load(ids + n, mask=inside, other=0)
            at = logits + row.to(tl.int64) * logits_row + token
            known = token < base_rows
            before = tl.load(at, mask=inside & known, other=0.0).to(tl.float32)
            z = tl.where(known, kept * before + share * z, z)
            tl.store(at, z.to(logits.dtype.element_ty), mask=inside)

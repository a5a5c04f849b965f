"""`sampling.sample` for steps that wait for nothing: settings in memory that is uploaded with a step, tokens that stay on the device."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .device_sampling_triton import draw_kernel
from .sampling import Draw, mixed_seeds, noise_key, noise_keys, sample
from .triton_compat import INTERPRETED, runs_triton

DRAW_WORDS = 9
"""int64 of a row: temperature, log of min_p, top_p, penalty (as fp64); key of noise, end of its ids, top_k, address and end of `seen`"""
PARTS = 1 if INTERPRETED else 64
"""programs of a row, at most; the interpreter runs one after another, so that none may wait"""
FEW_ROWS = 4
"""of a step whose rows have as many; half of it where there are more"""
BLOCK = 512
"""columns taken at once"""
_TURNS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}


class DeviceSampler:
    """Draws for up to as many rows as `host` has, as `sample` does: to the same tokens but where two draws are within rounding.

    `host` [rows, DRAW_WORDS] int64 is memory of the caller, who uploads it to `device` between `set` or `move_on` and what `run` launches;
    both stay at their addresses.
    """

    def __init__(self, host: np.ndarray, device: Tensor, columns: int) -> None:
        """`columns` of the logits."""
        rows = len(host)
        self._host, self._floats, self._device, self._columns = host, host.view(np.float64), device, columns
        self._values = torch.empty(rows, 2 * PARTS, dtype=torch.float64, device=device.device)
        self._ids = torch.empty(rows, 2 * PARTS, dtype=torch.int32, device=device.device)
        self._shares = torch.empty(rows, 2 * 8 * PARTS * 16, dtype=torch.float32, device=device.device)
        self._counters = torch.zeros(rows, dtype=torch.int32, device=device.device)
        self._written: list[tuple[float, ...]] = [()] * rows
        self._draws: Sequence[Draw] = ()
        self._positions: Sequence[int] = ()
        self._seeds: np.ndarray | None = None
        """of the draws at random, and which they are, since these were moved on first"""
        self._random = np.zeros(0, np.int64)
        self.set([Draw()] * rows)

    def set(self, draws: Sequence[Draw]) -> None:
        """How the first rows are drawn; the others by the largest of their numbers. What a draw has seen must stay until it is made."""
        for row in range(max(len(draws), len(self._draws))):
            words = self._words(draws[row] if row < len(draws) else Draw())
            if words != self._written[row]:
                self._written[row] = words
                self._floats[row, :4], self._host[row, 4:] = words[:4], words[4:]
        self._draws, self._positions, self._seeds = draws, [draw.position for draw in draws], None

    def move_on(self, positions: Sequence[int]) -> None:
        """The draws that were set last, each at another position; far cheaper than to set them again."""
        if self._seeds is None:
            self._seeds = mixed_seeds([draw.seed for draw in self._draws])
            self._random = np.array([draw.temperature > 0 for draw in self._draws], np.int64)
            self._written = [()] * len(self._written)  # their keys change from here on
        self._host[: len(positions), 4] = noise_keys(self._seeds, positions) * self._random
        self._positions = positions

    def _words(self, draw: Draw) -> tuple[float, ...]:
        seen = draw.seen if draw.repetition_penalty != 1.0 else None
        penalty = (draw.seen.data_ptr(), draw.seen.shape[0]) if seen is not None else (0, 0)
        ids = draw.vocab or self._columns
        if not draw.temperature > 0:
            return 0.0, -math.inf, 1.0, draw.repetition_penalty if seen is not None else 1.0, 0, ids, 0, *penalty
        return (draw.temperature, math.log(draw.min_p) if draw.min_p > 0 else -math.inf, draw.top_p,
                draw.repetition_penalty if seen is not None else 1.0, noise_key(draw.seed, draw.position), ids,
                draw.top_k if draw.top_k < self._columns else 0, *penalty)

    def run(self, logits: Tensor, tokens: Tensor) -> None:
        """Write the tokens [rows] int64 of logits [rows, columns], any float dtype; may be captured."""
        if not runs_triton(logits):
            rest = [Draw()] * (len(logits) - len(self._draws))
            draws = [replace(draw, position=position) for draw, position in zip(self._draws, self._positions, strict=True)]
            tokens.copy_(torch.tensor(sample(logits, [*draws, *rest][: len(logits)])))
            return
        rows, columns = logits.shape
        parts = PARTS if rows <= FEW_ROWS else max(1, PARTS // 2)
        part = -(-columns // (parts * BLOCK)) * BLOCK
        draw_kernel[(rows * parts,)](logits, self._device, tokens, self._values, self._ids, self._shares, self._counters, logits.stride(0),
                                     COLUMNS=columns, PART=part, PARTS=parts, BLOCK=BLOCK, WORDS=DRAW_WORDS,
                                     TURNS=_TURNS[logits.dtype], num_warps=4)

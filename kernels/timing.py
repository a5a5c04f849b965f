"""Where the time of a step goes, by laps: each lap owns the time since the one before it."""
from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch

CUDA_EVERY = 32
"""on CUDA every so many steps are split by events: recording hundreds of them takes a third of a small model's step"""


class LapTimer:
    """Splits one step after another into the times of its ops.

    `start()`, then `lap(op)` after each piece of work, then `finish()`. Every moment belongs to exactly one op, so the parts
    sum to the whole. On CUDA nothing waits before `finish`; a step that is not split there by events of its own has its
    measured time shared out as in the last one that was.
    """

    def __init__(self, ops: Iterable[str], device: torch.device) -> None:
        self._ops = tuple(ops)
        self._device = device
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        """kept from step to step: making one costs more than recording it"""
        self._recorded: list[str] = []
        """the op that ends at each event used in this step; the first event is the start"""
        self._steps = 0
        self._seconds: dict[str, float] = dict.fromkeys(self._ops, 0.0)
        self._began = self._last = 0.0

    def start(self) -> None:
        self._split = not self._cuda or self._steps % CUDA_EVERY == 0 or not any(self._seconds.values())
        self._steps += 1
        if self._split:
            self._seconds = dict.fromkeys(self._ops, 0.0)
            self._recorded.clear()
        if self._cuda and self._split:
            self._record("")
        self._began = self._last = time.perf_counter()

    def lap(self, op: str | Mapping[str, float]) -> None:
        """Give the time since the last lap to `op`; on a CPU to several, by their shares."""
        if not self._cuda:
            now = time.perf_counter()
            for part, share in ({op: 1.0} if isinstance(op, str) else op).items():
                self._seconds[part] += share * (now - self._last)
            self._last = now
        elif self._split:
            self._record(op)

    def finish(self) -> tuple[float, dict[str, float]]:
        """(milliseconds of the whole step, milliseconds by op)."""
        scale = 1e3
        if self._cuda:
            torch.cuda.synchronize(self._device)
            if self._split:
                self._read_events()
            total = sum(self._seconds.values())
            scale *= (time.perf_counter() - self._began) / total if total else 1.0
        parts = {op: seconds * scale for op, seconds in self._seconds.items()}
        return sum(parts.values()), parts

    def _record(self, op: str) -> None:
        if len(self._recorded) == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[len(self._recorded)].record()
        self._recorded.append(op)

    def _read_events(self) -> None:
        used = self._events[: len(self._recorded)]
        for before, after, op in zip(used, used[1:], self._recorded[1:], strict=False):
            self._seconds[op] += before.elapsed_time(after) / 1e3

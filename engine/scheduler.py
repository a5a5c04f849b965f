"""Who computes what in the next step: first come, first served, running replies before new prompts."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .blocks import BlockPool, blocks_for
from .request import Request

Acquire = Callable[[Request], str]
"""Takes the slots of a request's mix; "" when it has them, else what it must wait for. Raises ValueError when it never can."""


@dataclass(frozen=True, slots=True)
class Work:
    """The next `tokens` tokens of `request`."""

    request: Request
    tokens: int

    @property
    def sampled(self) -> bool:
        return self.tokens == self.request.pending


class Scheduler:
    """Requests that wait and that run. A running request holds its KV blocks, reserved whole, so it never stops half way."""

    def __init__(self, pool: BlockPool, step_tokens: int, max_running: int, long_after: int = 0) -> None:
        """`long_after`: requests of more tokens are computed by other RoPE factors (ModelFacts.long_after); 0 for models without such."""
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._step_tokens, self._max_running, self._long_after = step_tokens, max_running, long_after

    def check_fits(self, request: Request) -> None:
        """Raises ValueError, with the numbers, when it cannot fit even alone."""
        need = blocks_for(request.limit)
        if need > self.pool.blocks:
            raise ValueError(f"the request needs {need} KV blocks of 16 tokens (prompt {request.prompt_tokens}, up to {request.limit} in "
                             f"all), the memory holds {self.pool.blocks}; shorten the prompt or lower max_tokens")

    def add(self, request: Request) -> None:
        """Queue a request that fits (see `check_fits`)."""
        self.waiting.append(request)

    def next_admitted(self, acquire: Acquire) -> tuple[Request | None, str]:
        """Let the oldest waiting request run, if it can.

        Returns (the request now running or None, what the oldest one waits for or ""). What `acquire` raises is passed on;
        the request is the oldest waiting one still.
        """
        if not self.waiting:
            return None, ""
        request = self.waiting[0]
        because = self._lacks(request) or acquire(request)
        if because:
            return None, because
        self.waiting.popleft()
        request.table = self.pool.reserve(blocks_for(request.limit))
        request.started = time.perf_counter()
        self.running.append(request)
        return request, ""

    def _lacks(self, request: Request) -> str:
        if len(self.running) >= self._max_running:
            return f"{len(self.running)} requests are running, the limit is {self._max_running}"
        need = blocks_for(request.limit)
        if need > self.pool.free:
            return f"it needs {need} KV blocks, {self.pool.free} of {self.pool.blocks} are free"
        return ""

    def remove(self, request: Request) -> None:
        """Forget a request, running or waiting, and free its blocks."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        if request.table is not None:
            self.pool.release(request.table)
            request.table = None

    def plan(self) -> list[Work]:
        """A token for every reply under way; the rest of the step's tokens to prompts, oldest first."""
        if self._long_after:
            self._compute_grown_again()
        decoding = [Work(request, 1) for request in self.running if request.pending == 1]
        left = max(self._step_tokens - len(decoding), 1)
        prefill: list[Work] = []
        for request in self.running:
            if request.pending > 1 and left > 0:
                prefill.append(Work(request, min(request.pending, left)))
                left -= prefill[-1].tokens
        return decoding + prefill

    def _compute_grown_again(self) -> None:
        """What is stored of a request that has just grown beyond `long_after` tokens was turned by the short factors: as transformers does,
        all of it is computed again, under the mix that holds now."""
        for request in self.running:
            if not request.long and len(request.ids) > self._long_after:
                request.long, request.stored = True, 0

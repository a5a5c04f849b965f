"""How fast a reply is written right now."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SECONDS = 1.0
"""over which it is counted"""


@dataclass
class Pace:
    """`speed` is in tokens a second, 0 until a first second is over."""

    clock: Callable[[], float] = time.monotonic
    speed: float = 0.0
    _began: float | None = None
    _tokens: int = 0

    def take(self, tokens: int) -> None:
        """So many are there now."""
        now = self.clock()
        if self._began is None:
            self._began, self._tokens = now, tokens
        elif now - self._began >= SECONDS:
            self.speed = (tokens - self._tokens) / (now - self._began)
            self._began, self._tokens = now, tokens

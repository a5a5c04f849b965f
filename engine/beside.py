"""One piece of work on an adapter in a thread beside the loop, which may be given up at any time."""
from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Generic, TypeVar

import torch

from .adapter_read import Progress

Made = TypeVar("Made")
Work = Callable[[Progress, Callable[[], bool]], Made]
"""of (progress, cancelled)"""


class Beside(Generic[Made]):
    """Begins at once. `wake` is called by its thread once `outcome` is there."""

    def __init__(self, work: Work[Made], wake: Callable[[], None]) -> None:
        self.began = time.monotonic()
        self.done = self.total = 0
        """bytes"""
        self.outcome: Made | Exception | None = None
        self._work, self._wake = work, wake
        self._cancelled = Event()
        Thread(target=self._run, daemon=True).start()

    def cancel(self) -> None:
        """At once, even where it hangs: what its thread still brings is for nobody."""
        self._cancelled.set()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: the cores belong to the steps

        def progress(done: int, total: int) -> None:
            self.done, self.total = done, total

        try:
            self.outcome = self._work(progress, self._cancelled.is_set)
        except Exception as error:
            self.outcome = error
        self._wake()

"""One read of an adapter in a thread beside the loop, which may be given up at any time."""
from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread

import torch

from .adapter_read import Progress, ReadAdapter

Read = Callable[[Progress, Callable[[], bool]], ReadAdapter]
"""of (progress, cancelled)"""


class DiskRead:
    """Begins at once. `wake` is called by its thread once `outcome` is there."""

    def __init__(self, read: Read, wake: Callable[[], None]) -> None:
        self.began = time.monotonic()
        self.done = self.total = 0
        """bytes"""
        self.outcome: ReadAdapter | Exception | None = None
        self._read, self._wake = read, wake
        self._cancelled = Event()
        Thread(target=self._run, daemon=True).start()

    def cancel(self) -> None:
        """At once, even where the read hangs: what its thread still brings is for nobody."""
        self._cancelled.set()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: the cores belong to the steps

        def progress(done: int, total: int) -> None:
            self.done, self.total = done, total

        try:
            self.outcome = self._read(progress, self._cancelled.is_set)
        except Exception as error:
            self.outcome = error
        self._wake()

"""Adapters that are being read: one after the other in a thread beside the loop, each of them cancellable at any time."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event, Thread

import torch

from .adapter_read import Progress, ReadAdapter
from .protocol import AdapterLoading, LoadAdapter, ReloadAdapter

Read = Callable[[Progress, Callable[[], bool]], ReadAdapter]
LONG_SECONDS = 0.3
"""a load that takes longer tells how far it is"""
TELL_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Load:
    command: LoadAdapter | ReloadAdapter
    path: str
    read: Read
    cancelled: Event = field(default_factory=Event)
    began: float = 0.0
    done: int = 0
    total: int = 0
    outcome: ReadAdapter | Exception | None = None


class AdapterLoads:
    """Loads in the order in which they were asked for. One thread, the engine's, calls the methods; `wake` is called by others."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._loads: deque[_Load] = deque()
        self._told = 0.0

    @property
    def pending(self) -> bool:
        return bool(self._loads)

    @property
    def names(self) -> frozenset[str]:
        """Of the adapters that are being read, as far as their commands give one."""
        return frozenset(load.command.name for load in self._loads if load.command.name)

    def start(self, command: LoadAdapter | ReloadAdapter, path: str, read: Read) -> None:
        """Have `read(progress, cancelled)` called in a thread once those before are done; `path` is for the screen."""
        self._loads.append(_Load(command, path, read))
        self._go_on()

    def finished(self) -> Iterator[tuple[LoadAdapter | ReloadAdapter, ReadAdapter | Exception]]:
        """Those that are done, oldest first, each given once."""
        while self._loads and (outcome := self._loads[0].outcome) is not None:
            load = self._loads.popleft()
            self._go_on()
            yield load.command, outcome

    def cancel(self) -> list[tuple[LoadAdapter | ReloadAdapter, str]]:
        """Give up all; (command, path) of each. At once, even where a read hangs: what its thread still brings is dropped."""
        dropped = [(load.command, load.path) for load in self._loads]
        for load in self._loads:
            load.cancelled.set()
        self._loads.clear()
        return dropped

    def progress(self) -> AdapterLoading | None:
        """How far the load is that is being read, when it is a long one and was not told just now."""
        now = time.monotonic()
        if not self._loads or now - self._loads[0].began < LONG_SECONDS or now - self._told < TELL_SECONDS:
            return None
        self._told = now
        load = self._loads[0]
        return AdapterLoading(load.command.name or "", load.path, load.done, load.total)

    def _go_on(self) -> None:
        if self._loads and not self._loads[0].began:
            self._loads[0].began = time.monotonic()
            Thread(target=self._run, args=(self._loads[0],), daemon=True).start()

    def _run(self, load: _Load) -> None:
        torch.set_num_threads(1)  # of this thread: the cores belong to the steps

        def progress(done: int, total: int) -> None:
            load.done, load.total = done, total

        try:
            load.outcome = load.read(progress, load.cancelled.is_set)
        except Exception as error:
            load.outcome = error
        self._wake()

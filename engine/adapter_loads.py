"""Adapters that were asked for by commands: read one after the other beside the loop, each of them cancellable at any time."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .adapter_read import ReadAdapter
from .beside import Beside, Work
from .protocol import AdapterLoading, LoadAdapter, ReloadAdapter

LONG_SECONDS = 0.3
"""a load that takes longer tells how far it is"""
TELL_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Load:
    command: LoadAdapter | ReloadAdapter
    path: str
    read: Work[ReadAdapter]
    now: Beside[ReadAdapter] | None = None


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

    def start(self, command: LoadAdapter | ReloadAdapter, path: str, read: Work[ReadAdapter]) -> None:
        """Have `read(progress, cancelled)` called in a thread once those before are done; `path` is for the screen."""
        self._loads.append(_Load(command, path, read))
        self._go_on()

    def finished(self) -> Iterator[tuple[LoadAdapter | ReloadAdapter, ReadAdapter | Exception]]:
        """Those that are done, oldest first, each given once."""
        while self._loads and (now := self._loads[0].now) is not None and now.outcome is not None:
            load = self._loads.popleft()
            self._go_on()
            yield load.command, now.outcome

    def cancel(self) -> list[tuple[LoadAdapter | ReloadAdapter, str]]:
        """Give up all; (command, path) of each. At once, even where a read hangs: what its thread still brings is dropped."""
        dropped = [(load.command, load.path) for load in self._loads]
        if self._loads and self._loads[0].now is not None:
            self._loads[0].now.cancel()
        self._loads.clear()
        return dropped

    def progress(self) -> AdapterLoading | None:
        """How far the load is that is being read, when it is a long one and was not told just now."""
        at, read = time.monotonic(), self._loads[0].now if self._loads else None
        if read is None or at - read.began < LONG_SECONDS or at - self._told < TELL_SECONDS:
            return None
        self._told = at
        return AdapterLoading(self._loads[0].command.name or "", self._loads[0].path, read.done, read.total)

    def _go_on(self) -> None:
        if self._loads and self._loads[0].now is None:
            self._loads[0].now = Beside(self._loads[0].read, self._wake)

"""The engine's loop in a thread of its own, for measurements that hear when each of its events came."""
from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition, Thread
from types import TracebackType
from typing import TypeVar

from .bench_errors import NotMeasured
from .inbox import Inbox
from .protocol import AdapterFailed, Command, CommandFailed, EngineFailed, Event, MixRefused, ModelFailed, RequestFailed, Shutdown
from .service import serve

Kind = TypeVar("Kind", bound=Event)
LOAD_FAILURES = AdapterFailed, ModelFailed
FAILURES = *LOAD_FAILURES, CommandFailed, EngineFailed, MixRefused, RequestFailed
WAIT_SECONDS = 600.0
"""after which an event is not waited for any more"""


class CannotLoad(ValueError):
    """A base or an adapter that the engine refused, in its words."""


class TimedLoop:
    """A context manager: commands down, events up with the time at which each came, by `time.perf_counter`."""

    def __init__(self) -> None:
        self._inbox, self._news = Inbox(), Condition()
        self._events: list[tuple[float, Event]] = []
        self._thread = Thread(target=serve, args=(self._inbox, self._hear), daemon=True)

    def __enter__(self) -> TimedLoop:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inbox.put(Shutdown())
        self._thread.join(30.0)

    @property
    def heard(self) -> int:
        """Events so far."""
        return len(self._events)

    def put(self, *commands: Command) -> float:
        """Returns when."""
        now = time.perf_counter()
        for command in commands:
            self._inbox.put(command)
        return now

    def wait(self, kind: type[Kind], after: int, wanted: Callable[[float, Kind], bool] = lambda when, event: True) -> tuple[float, Kind]:
        """When the first event behind the first `after` came of which `wanted(when it came, it)` holds, and it.

        Raises CannotLoad or NotMeasured for a failure before it.
        """
        with self._news:
            place = after
            while True:
                for when, event in self._events[place:]:
                    if isinstance(event, kind) and wanted(when, event):
                        return when, event
                    if isinstance(event, FAILURES):
                        raise (CannotLoad if isinstance(event, LOAD_FAILURES) else NotMeasured)(event.message)
                place = len(self._events)
                if not self._news.wait(WAIT_SECONDS):
                    raise NotMeasured(f"the engine said nothing for {WAIT_SECONDS:.0f} seconds")

    def all(self, kind: type[Kind], after: int) -> list[tuple[float, Kind]]:
        """Those behind the first `after` that came so far."""
        with self._news:
            return [(when, event) for when, event in self._events[after:] if isinstance(event, kind)]

    def _hear(self, event: Event) -> None:
        with self._news:
            self._events.append((time.perf_counter(), event))
            self._news.notify_all()

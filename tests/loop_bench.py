"""The loop in a thread of its own, with its events, for tests of what happens beside its steps."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_bench.engine.protocol import (
    AdapterFailed,
    AdapterLoaded,
    AdapterReloaded,
    AdapterUnloaded,
    AdapterUse,
    Command,
    EngineSnapshot,
    Event,
    Generate,
    LoadModel,
    MixRefused,
    MixSet,
    ModelFailed,
    ModelLoaded,
    ReloadFailed,
    RequestFailed,
    RequestFinished,
    Sampling,
    Shutdown,
    TokenIds,
)
from lora_bench.engine.service import Inbox, serve


class Loop:
    """A loop in a thread, and its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = threading.Condition()
        self._inbox = Inbox()
        self.thread = threading.Thread(target=serve, args=(self._inbox, self.emit), daemon=True)

    def emit(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self._inbox.put(command)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type, count: int = 1, seconds: float = 30.0) -> Event:
        """The event number `count` of a kind."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.of(kind)) >= count, seconds), f"no {kind.__name__}: {self.events[-5:]}"
        return self.of(kind)[count - 1]

    def wait_until(self, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        """Until `holds()` after some event."""
        with self._news:
            assert self._news.wait_for(holds, seconds), self.events[-5:]

    def now(self) -> EngineSnapshot:
        """A snapshot that is still to come."""
        return self.wait(EngineSnapshot, len(self.of(EngineSnapshot)) + 1)

    def story(self) -> list[str]:
        """Kinds of all events that end something."""
        ends = (AdapterLoaded, AdapterFailed, AdapterReloaded, ReloadFailed, AdapterUnloaded, MixSet, MixRefused, RequestFinished,
                RequestFailed, ModelLoaded, ModelFailed)
        return [type(event).__name__ for event in self.events if isinstance(event, ends)]


@contextmanager
def running(load: LoadModel) -> Iterator[Loop]:
    """A loop with a base, which ends when it is told to."""
    loop = Loop()
    loop.thread.start()
    loop.send(load)
    loop.wait(ModelLoaded)
    loop.events.clear()
    yield loop
    loop.send(Shutdown())
    loop.thread.join(10)
    assert not loop.thread.is_alive()


def ask(number: int, *names: str, tokens: int = 4) -> Generate:
    return Generate(number, TokenIds((5, 6, 7)), tuple(AdapterUse(name) for name in names), Sampling(temperature=1.0, max_tokens=tokens))

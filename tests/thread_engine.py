"""The engine's loop in a thread of the test's process: the same loop and commands as in the child, without another import of torch."""
from __future__ import annotations

import threading

from lora_bench.engine import protocol as p
from lora_bench.engine.inbox import Inbox
from lora_bench.engine.service import serve


class ThreadEngine:
    """A Backend over a real engine. It keeps what it was sent and what it said."""

    answers = True
    """as a scripted engine's: it loads what it is asked to"""

    def __init__(self, emit: p.Emit, *_: object) -> None:
        self._emit = emit
        self._inbox: Inbox | None = None
        self._thread: threading.Thread | None = None
        self.sent: list[p.Command] = []
        self.said: list[p.Event] = []

    def start(self) -> None:
        self.stop()
        self._inbox = Inbox()
        self._thread = threading.Thread(target=serve, args=(self._inbox, self._say), daemon=True)
        self._say(p.EngineStarted(1, "", ("cpu",)))
        self._thread.start()

    def send(self, command: p.Command) -> None:
        self.sent.append(command)
        self._inbox.put(command)

    def stop(self, timeout: float = 30.0) -> None:
        if self._thread is not None:
            self._inbox.put(p.Shutdown())
            self._thread.join(timeout)
            self._thread = None

    def of(self, kind: type) -> list:
        """The commands of one kind that it was sent."""
        return [command for command in self.sent if isinstance(command, kind)]

    def _say(self, event: p.Event) -> None:
        self.said.append(event)
        self._emit(event)

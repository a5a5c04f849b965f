"""Commands on their way from the front end to the engine's loop."""
from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable

from .protocol import CancelLoad, Command, Shutdown


class Inbox:
    """Commands on their way to the loop. Any thread may put; the loop takes, and may look for a cancel while it is busy."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._seen: deque[Command] = deque()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def wake(self) -> None:
        """Let a `take` that waits return None now."""
        self._queue.put(None)

    def put_back(self, commands: Iterable[Command]) -> None:
        """In front of all others, in this order."""
        self._seen.extendleft(reversed(list(commands)))

    def take(self, timeout: float) -> Command | None:
        """The oldest command; None when there is none within `timeout` seconds."""
        if self._seen:
            return self._seen.popleft()
        if timeout <= 0 and self._queue.empty():
            return None
        try:
            return self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None

    def load_cancelled(self) -> bool:
        """Whether CancelLoad (which is used up) or Shutdown (which stays) came in behind the command being carried out."""
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                self._seen.append(command)
        cancels = [command for command in self._seen if isinstance(command, CancelLoad)]
        for command in cancels:
            self._seen.remove(command)
        return bool(cancels) or any(isinstance(command, Shutdown) for command in self._seen)

"""Events on their way out, in their order; some of them are sent while the device computes what comes next."""
from __future__ import annotations

from collections.abc import Callable

from .protocol import Emit, Event


class Outbox:
    """Called with an event it sends it, after all that was to be sent later."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: list[Callable[[], Event]] = []

    def __call__(self, event: Event) -> None:
        self.flush()
        self._emit(event)

    def later(self, make: Callable[[], Event]) -> None:
        """Make an event and send it with the next `flush`, at the latest before the next event."""
        self._held.append(make)

    def flush(self) -> None:
        held, self._held = self._held, []
        for make in held:
            self._emit(make())

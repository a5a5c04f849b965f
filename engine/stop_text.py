"""Stop strings in a reply that arrives in pieces."""
from __future__ import annotations


class StopText:
    """Holds back text that may turn out to be the beginning of a stop string, and never lets any of a stop string out."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops` are not empty (`request.check_sampling` refuses empty ones)."""
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string is complete). After a stop nothing more may be pushed."""
        if not self._stops:
            return text, False
        self._held += text
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            return self._held[: min(places)], True
        safe = len(self._held) - self._unfinished()
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, False

    def finish(self) -> str:
        """What was held back, when the reply ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

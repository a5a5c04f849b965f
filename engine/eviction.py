"""Which key of a full cache goes first: the least recently used."""
from __future__ import annotations

from collections.abc import Iterator


class Lru:
    """Keys in the order of their last use."""

    def __init__(self) -> None:
        self._order: dict[str, None] = {}

    def touch(self, key: str) -> None:
        """`key` was used now; adds it when it is new."""
        self._order.pop(key, None)
        self._order[key] = None

    def remove(self, key: str) -> None:
        self._order.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        """Least recently used first."""
        return iter(self._order)

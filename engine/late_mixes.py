"""Changes of the mix that wait for adapters which are being read from disk; replies go on under what they have."""
from __future__ import annotations

from collections.abc import Callable, Iterator

from .adapter_store import AdapterStore
from .failures import sentence
from .fetches import Want
from .protocol import Emit, Mix, MixRefused, SetMix


def acting(mix: Mix) -> list[str]:
    """The adapters that `mix` needs in slots."""
    return [use.name for use in mix if use.scale != 0]


class LateMixes:
    """They are carried out in their order, by `change(command)`."""

    def __init__(self, change: Callable[[SetMix], object], emit: Emit) -> None:
        self._change, self._emit = change, emit
        self._waiting: list[SetMix] = []

    def holds_back(self, command: SetMix, store: AdapterStore) -> bool:
        """Whether `command` must wait, and does so now. It takes the place of those that wait to change nothing but what it changes."""
        self._waiting = [other for other in self._waiting if not set(other.request_ids) <= set(command.request_ids)]
        late = bool(self._waiting or store.lacking(acting(command.mix)))
        if late:
            self._waiting.append(command)
        return late

    def go_on(self, store: AdapterStore) -> None:
        """Carry out those whose adapters are there now, or cannot be had. A refusal is told."""
        while self._waiting and not store.lacking(acting(self._waiting[0].mix)):
            command = self._waiting.pop(0)
            try:
                self._change(command)
            except Exception as error:
                self._emit(MixRefused(command.mix, sentence(error)))

    def wanted(self) -> Iterator[Want]:
        for command in self._waiting:
            yield Want(acting(command.mix), "the mix that was set")

    def drop(self, because: str) -> None:
        """Refuse them all, told with the cause."""
        for command in self._waiting:
            self._emit(MixRefused(command.mix, because))
        self._waiting.clear()

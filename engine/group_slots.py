"""Slots for the adapters of groups of requests; for what acted on a reply before its mix was changed, too."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from .adapter_store import AdapterStore
from .failures import refusal, sentence
from .fetches import Want
from .group import Group
from .mix_history import MixHistory
from .protocol import requests_text
from .request import Request
from .scheduler import LOOKED_AT, GroupRefused
from .slot_pool import MixTooLarge, SlotsBusy

ON_THE_WAY = "on the way to a slot"


class GroupSlots:
    """`Slots` of a scheduler over the adapters of one base."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store

    def acquire(self, group: Group, alone: bool) -> str:
        """See `Slots`. A reply that goes on after a preemption needs its former mixes as well, to compute again what they acted on. Where
        they cannot be had any more the mix that holds acts there instead, as its `remark` says."""
        for request in group.requests:
            gone = [use.name for use in request.history.uses if not self._store.holds(use.name, use.digest)]
            if gone and len(request.history.parts) > 1:
                self._forget_former(request, f"{', '.join(dict.fromkeys(gone))} of its former mix is not loaded any more")
        former = any(len(request.history.parts) > 1 for request in group.requests)
        try:
            return self._acquire(group, alone)
        except SlotsBusy as busy:
            if not (former and alone):
                return str(busy)
            why = str(busy)
        except Exception as error:
            if not refusal(error):
                raise
            if not former:
                raise GroupRefused(group, error) from error
            why = sentence(error)
        for request in group.requests:
            if len(request.history.parts) > 1:
                self._forget_former(request, why)
        return self.acquire(group, alone)

    def there(self, group: Group) -> bool:
        return self._store.in_slots(_names(group))

    def give_back(self, group: Group) -> None:
        for request in group.requests:
            if group.preempted:
                self.caught_up(request)
            else:
                self._store.wait_again(request.id)

    def caught_up(self, request: Request) -> None:
        """It computes under no former mix now and gives their slots back."""
        if request.holds_former:
            request.holds_former = False
            self._store.acquire(request.mix.names, request.id, f"request {request.id}")

    def reading(self, group: Group) -> str:
        """Which of its adapters must be read from disk before it can have its slots, in words; "" for none."""
        return _are(self._store.on_disk(_names(group)), "being read from disk")

    def lacking(self, group: Group) -> str:
        return self.reading(group) or _are(self._store.lacking(_names(group)), ON_THE_WAY)

    def wanted(self, queue: Iterable[Group]) -> Iterator[Want]:
        """What those that wait will need, in their order."""
        for group in islice(queue, LOOKED_AT):
            who = requests_text(request.id for request in group.requests)
            yield Want(_names(group), f"{who}, which {'waits' if len(group.requests) == 1 else 'wait'}")

    def _acquire(self, group: Group, alone: bool) -> str:
        because = requests_text(request.id for request in group.requests)
        try:
            arriving = self._store.exchange({request.id: request.history.names for request in group.requests}, {}, because)
        except MixTooLarge as error:
            raise MixTooLarge(f"{because} run together: {error}" if len(group.requests) > 1 else str(error)) from error
        for request in group.requests:
            request.holds_former = len(request.history.parts) > 1
        if arriving and not alone:  # those that run do not wait for it
            self.give_back(group)
            return _are(arriving, ON_THE_WAY)
        return ""

    def _forget_former(self, request: Request, why: str) -> None:
        """What is known of `request` is computed under the mix that holds now, from its first token on."""
        request.history = MixHistory.of(request.mix)
        request.remark = f"all of it under the mix that holds now: {why}"


def _names(group: Group) -> list[str]:
    """Of all that its requests need in slots."""
    return list(dict.fromkeys(name for request in group.requests for name in request.history.names))


def _are(names: list[str], how: str) -> str:
    if not names:
        return ""
    return f"adapter {names[0]} is {how}" if len(names) == 1 else f"adapters {', '.join(names)} are {how}"

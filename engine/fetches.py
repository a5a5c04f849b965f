"""Adapters on their way to those who wait for them: read and made ready for a slot beside the loop, and put into slots that are free."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from .adapter_read import Progress, ReadAdapter, read_again
from .adapter_records import Records
from .adapters.errors import AdapterError
from .beside import Beside, Work
from .failures import out_of_memory, refusal, sentence
from .models.facts import ModelFacts
from .slot_pool import SlotsBusy
from .tiers import Ready, Tiers

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Want:
    """Adapters that will need slots, all at once; `because` completes "for ..."."""

    names: Sequence[str]
    because: str


@dataclass(frozen=True, slots=True)
class _Work(Generic[Made]):
    name: str
    digest: str
    because: str
    beside: Beside[Made]


class Fetches:
    """What someone waits for is read, where it lies on disk only, and made ready for its slot: of each one at a time, in the order of those
    who wait.

    What was read stays in the host tier until it is in its slot or nobody waits for it any more. Ready are at most the adapters of one who
    waits, and those that free slots will take. Without `wake`, which the working thread calls when it is done, nothing is done beforehand:
    who needs slots reads and makes ready, and waits.
    """

    def __init__(self, tiers: Tiers, records: Records, facts: ModelFacts, wake: Callable[[], None] | None) -> None:
        self._tiers, self._records, self._facts, self._wake = tiers, records, facts, wake
        self._read: _Work[ReadAdapter] | None = None
        self._make: _Work[Ready] | None = None
        self._aside: dict[str, ReadAdapter] = {}
        """read for the first who waits, whose mix is larger than the host tier"""
        self._ready: dict[str, Ready] = {}
        self._failures: dict[str, Exception] = {}
        """of those that someone waits for"""
        self._nobody = False
        """waited when that was said last"""

    @property
    def reading(self) -> str:
        """The adapter that is being read, "" for none."""
        return self._read.name if self._read is not None else ""

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Those that must be read or made ready beside the loop before they can have slots."""
        return [name for name in dict.fromkeys(names) if self._is_lacking(name)] if self._wake is not None else []

    def on_disk(self, names: Iterable[str]) -> list[str]:
        """Those of `lacking` that must be read."""
        return [name for name in self.lacking(names) if self._must_be_read(name)]

    def settle(self) -> None:
        """Take in what was read or made ready."""
        if (read := self._read) is not None and (outcome := read.beside.outcome) is not None:
            self._read = None
            if self._stands(read) and self._must_be_read(read.name):
                self._take_read(read, outcome)
        if (make := self._make) is not None and (made := make.beside.outcome) is not None:
            self._make = None
            if self._stands(make) and isinstance(made, Exception):
                self._failures[make.name] = _told(made, f"adapter {make.name!r} cannot be brought to the device")
            elif self._stands(make):
                self._ready[make.name] = made

    def want(self, wanted: Iterable[Want]) -> None:
        """Who waits now, in place of who waited before; first come first. Each step of the loop says it anew."""
        wanted = [want for want in wanted if want.names]
        if not wanted and self._nobody and not (self._aside or self._ready or self._failures):
            return
        self._nobody = not wanted
        near = self._near(wanted)
        self._tiers.host.kept = frozenset(name for name, (_, fits) in near.items() if fits)
        ahead = dict(self._ahead(wanted))
        if self._wake is None:
            self._fill_free_slot(ahead)
        else:
            self._place_ready(ahead)
        to_make = {**self._next_made(wanted), **ahead}
        for left, kept in ((self._aside, near), (self._ready, to_make), (self._failures, near | to_make)):
            for name in left.keys() - kept.keys():
                del left[name]
        if self._wake is not None:
            self._go_on({name: because for name, (because, _) in near.items()}, to_make, self._wake)

    def give_slots(self, names: Sequence[str], holds: Mapping[int, Sequence[str]], because: str) -> None:
        """See `Tiers.give_slots`; what is not ready is brought at once where nothing is done beforehand, else SlotsBusy is raised."""
        self._tiers.give_slots(names, holds, because, self._brought)
        for name in names:
            self.drop(name)

    def offer(self, name: str, ready: Ready) -> None:
        """`name` is ready already; kept until nobody is found to wait for it."""
        self._ready[name] = ready

    def drop(self, name: str) -> None:
        """What was read as `name` or made ready is not needed, or is not what it means now."""
        for left in (self._aside, self._ready, self._failures):
            left.pop(name, None)

    def read_again(self, name: str) -> Work[ReadAdapter]:
        """What reads `name` as it is now; any thread may call it. It raises AdapterError in words."""
        record = self._records[name]

        def read(progress: Progress, cancelled: Callable[[], bool]) -> ReadAdapter:
            found = read_again(record.source, record.info, self._facts, progress, cancelled)
            return replace(found, adapter=self._tiers.prepared(found.adapter))

        return read

    # -- where they are ----------------------------------------------------------------------------
    def _is_lacking(self, name: str) -> bool:
        return (name in self._records and self._tiers.pool.get(name) is None and name not in self._ready and name not in self._failures)

    def _must_be_read(self, name: str) -> bool:
        return self._is_lacking(name) and name not in self._tiers.host and name not in self._aside

    def _can_be_made(self, name: str) -> bool:
        return self._is_lacking(name) and not self._must_be_read(name)

    def _stands(self, work: _Work[Any]) -> bool:
        """Whether its adapter is still wanting, and means what it did when the work began."""
        return self._is_lacking(work.name) and self._records[work.name].info.digest == work.digest

    def _brought(self, name: str) -> Ready:
        if name in self._failures:
            raise self._failures[name]
        if name in self._ready:
            return self._ready[name]
        if self._wake is not None:
            raise SlotsBusy(f"adapter {name!r} must be made ready for its slot first")
        if (adapter := self._tiers.host.get(name)) is not None:
            return self._tiers.ready(name, adapter)
        read = self.read_again(name)(lambda done, total: None, lambda: False)
        return self._tiers.ready(name, read.adapter, "disk", read.ms)

    # -- what is done next -------------------------------------------------------------------------
    def _near(self, wanted: Sequence[Want]) -> dict[str, tuple[str, bool]]:
        """name -> (because, whether it has room in the host tier) of all that will be needed next and is in no slot.

        The adapters of the first who waits are all among them.
        """
        near: dict[str, tuple[str, bool]] = {}
        room = self._tiers.host.limit_bytes
        for place, want in enumerate(wanted):
            for name in want.names:
                if name in near or name not in self._records or self._tiers.pool.get(name) is not None:
                    continue
                size = self._tiers.host_bytes(self._records[name].info, self._records[name].pages)
                if size > room and place:
                    return near
                near[name] = want.because, size <= room
                room -= size if size <= room else 0
        return near

    def _next_made(self, wanted: Sequence[Want]) -> dict[str, str]:
        """name -> because, of the first who waits for no read: who waits behind that one may not pass it for a slot."""
        for want in wanted:
            names = [name for name in want.names if name in self._records and self._tiers.pool.get(name) is None]
            if names and not any(self._must_be_read(name) for name in names):
                return dict.fromkeys(names, want.because)
        return {}

    def _ahead(self, wanted: Sequence[Want]) -> Iterator[tuple[str, str]]:
        """(name, because) of what free slots will take; none goes into a slot that an earlier one will take."""
        ahead: dict[str, Mapping[str, int]] = {}
        for want in wanted:
            lacking = [name for name in want.names
                       if name in self._records and name not in ahead and self._tiers.pool.get(name) is None]
            ahead |= self._tiers.needs(lacking)
            if not self._tiers.pool.has_room(ahead):
                return
            yield from dict.fromkeys(lacking, want.because).items()

    def _go_on(self, near: Mapping[str, str], to_make: Mapping[str, str], wake: Callable[[], None]) -> None:
        """The next read and the next to be made ready, unless somebody waits for what is under way."""
        if self._read is not None and not (self._read.name in near and self._must_be_read(self._read.name)):
            self._read.beside.cancel()
            self._read = None
        if self._read is None and (name := next(filter(self._must_be_read, near), "")):
            self._read = _Work(name, self._records[name].info.digest, near[name], Beside(self.read_again(name), wake))
        if self._make is not None and not (self._make.name in to_make and self._can_be_made(self._make.name)):
            self._make.beside.cancel()
            self._make = None
        if self._make is None and (name := next(filter(self._can_be_made, to_make), "")):
            self._make = _Work(name, self._records[name].info.digest, to_make[name], Beside(self._maker(name), wake))

    def _maker(self, name: str) -> Work[Ready]:
        if (aside := self._aside.get(name)) is not None:
            make = partial(self._tiers.ready, name, aside.adapter, "disk", aside.ms)
        else:
            make = partial(self._tiers.ready, name, self._tiers.host.get(name))
        return lambda progress, cancelled: make()

    def _take_read(self, read: _Work[ReadAdapter], outcome: ReadAdapter | Exception) -> None:
        if isinstance(outcome, Exception):
            self._failures[read.name] = _told(outcome, f"adapter {read.name!r} cannot be read again")
        elif read.name in self._tiers.host.kept:
            self._tiers.host.put(read.name, outcome.adapter, outcome.ms, read.because)
        else:
            self._aside[read.name] = outcome

    def _place_ready(self, ahead: Mapping[str, str]) -> None:
        for name, because in ahead.items():
            if name in self._ready:
                self.give_slots([name], {}, because)

    def _fill_free_slot(self, ahead: Mapping[str, str]) -> None:
        """One adapter a step, so that replies wait for little."""
        for name, because in ahead.items():
            if name in self._tiers.host and name not in self._failures:
                try:
                    self.give_slots([name], {}, because)
                except Exception as error:
                    if not refusal(error):
                        raise
                    self._failures[name] = error  # it is tried once more, and told, when its turn comes
                return


def _told(error: Exception, what: str) -> Exception:
    """`error` if it says itself what is the matter, else in a sentence that begins with `what`."""
    return error if isinstance(error, AdapterError) or out_of_memory(error) else AdapterError(f"{what}: {sentence(error)}")

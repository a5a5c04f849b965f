"""Adapters on their way to those who wait for them: from disk to the host tier beside the loop, and into slots that are free."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .adapter_read import Progress, ReadAdapter, Source, read_again
from .adapter_records import Records
from .adapters.adapter import Adapter
from .adapters.errors import AdapterError
from .disk_read import DiskRead
from .failures import out_of_memory, refusal, sentence
from .models.facts import ModelFacts
from .protocol import AdapterInfo
from .tiers import Tiers


@dataclass(frozen=True, slots=True)
class Want:
    """Adapters that will need slots; `because` completes "for ..."."""

    names: Sequence[str]
    because: str


@dataclass(frozen=True, slots=True)
class _Fetch:
    name: str
    digest: str
    because: str
    read: DiskRead


class Fetches:
    """What lies on disk only is read once someone waits for it, one adapter at a time, in the order of those who wait.

    What was read stays in the host tier until it is in its slot or nobody waits for it any more. Without `wake`, which a reading thread
    calls when it is done, nothing is read beforehand: `again` reads, and who calls it waits.
    """

    def __init__(self, tiers: Tiers, records: Records, facts: ModelFacts, wake: Callable[[], None] | None) -> None:
        self._tiers, self._records, self._facts, self._wake = tiers, records, facts, wake
        self._now: _Fetch | None = None
        self._aside: dict[str, ReadAdapter] = {}
        """read for the first who waits, whose mix is larger than the host tier"""
        self._failures: dict[str, Exception] = {}
        """of those that someone waits for"""

    @property
    def reading(self) -> str:
        """The adapter that is being read, "" for none."""
        return self._now.name if self._now is not None else ""

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Those that must be read beside the loop before they can have slots."""
        return [name for name in names if self._on_disk(name)] if self._wake is not None else []

    def settle(self) -> None:
        """Take in what was read."""
        fetch = self._now
        if fetch is None or (outcome := fetch.read.outcome) is None:
            return
        self._now = None
        name, record = fetch.name, self._records.get(fetch.name)
        if record is None or record.info.digest != fetch.digest or not self._on_disk(name):
            return
        if isinstance(outcome, Exception):
            known = isinstance(outcome, AdapterError) or out_of_memory(outcome)
            self._failures[name] = outcome if known else AdapterError(f"adapter {name!r} cannot be read again: {sentence(outcome)}")
        elif name in self._tiers.host.kept:
            self._tiers.host.put(name, outcome.adapter, outcome.ms, fetch.because)
        else:
            self._aside[name] = outcome

    def want(self, wanted: Iterable[Want]) -> None:
        """Who waits, first come first: their adapters stay in the host tier, as many as fit there, and the next one is brought nearer."""
        wanted = list(wanted)
        near = self._near(wanted)
        self._tiers.host.kept = frozenset(name for name, (_, fits) in near.items() if fits)
        for left in (self._aside, self._failures):
            for name in left.keys() - near.keys():
                del left[name]
        self._read_next({name: because for name, (because, _) in near.items()})
        self._fill_free_slot(wanted)

    def drop(self, name: str) -> None:
        """What was read as `name` is not what it means now."""
        self._aside.pop(name, None)
        self._failures.pop(name, None)

    def again(self, name: str) -> Adapter:
        """What is in no tier any more: as it was read for those who wait, else read now. Raises AdapterError in words."""
        if name in self._failures:
            raise self._failures[name]
        if name in self._aside:
            return self._aside.pop(name).adapter
        record = self._records[name]
        return read_again(record.source, record.info, self._facts).adapter

    def _on_disk(self, name: str) -> bool:
        return (name in self._records and self._tiers.place(name)[0] == "disk"
                and name not in self._aside and name not in self._failures)

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

    def _read_next(self, near: dict[str, str]) -> None:
        if self._now is not None and (self._now.name not in near or not self._on_disk(self._now.name)):
            self._now.read.cancel()
            self._now = None
        if self._wake is None or self._now is not None:
            return
        if name := next(filter(self._on_disk, near), ""):
            record = self._records[name]
            read = partial(self._read, record.source, record.info)
            self._now = _Fetch(name, record.info.digest, near[name], DiskRead(read, self._wake))

    def _read(self, source: Source, info: AdapterInfo, progress: Progress, cancelled: Callable[[], bool]) -> ReadAdapter:
        read = read_again(source, info, self._facts, progress, cancelled)
        return replace(read, adapter=self._tiers.prepared(read.adapter))

    def _fill_free_slot(self, wanted: Sequence[Want]) -> None:
        """One adapter a step, so that replies wait for little; none into a slot that an earlier one will take."""
        ahead: dict[str, Mapping[str, int]] = {}
        for want in wanted:
            lacking = [name for name in want.names if name not in ahead and self._tiers.pool.get(name) is None]
            ahead |= self._tiers.needs(lacking)
            if not self._tiers.pool.has_room(ahead):
                return
            for name in lacking:
                if name in self._tiers.host and name not in self._failures:
                    self._fill(name, want.because)
                    return

    def _fill(self, name: str, because: str) -> None:
        try:
            self._tiers.give_slots([name], {}, because, self.again)
        except Exception as error:
            if not refusal(error):
                raise
            self._failures[name] = error  # it is tried once more, and told, when its turn comes

"""The device's slots: who is in which, who may not be moved, who goes when room is needed."""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from .eviction import Lru
from .page_image import PageImage
from .page_pool import PagePool
from .protocol import Emit, SlotEvicted, SlotLoaded, SlotTouched, SlotView, requests_text
from .slots import Slot, SlotContent

Needs = Mapping[str, Mapping[str, int]]
"""adapter -> pages by kind of fused linear"""


class MixTooLarge(ValueError):
    """A mix that cannot have slots however long it waits; the text has the numbers."""


class SlotsBusy(ValueError):
    """A mix that can have slots once running requests end; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An adapter ready to enter a slot. `source` is "host" or "disk"; `ms` is the time it took to bring it to the device."""

    name: str
    content: SlotContent
    image: PageImage | None
    """what of it goes into pages"""
    source: str
    ms: float


class SlotPool:
    """`count` slots, and the pages of what is in them. A user is a running request; the adapters it holds stay. Emits every move with
    its cause."""

    def __init__(self, count: int, emit: Emit, pages: PagePool | None = None) -> None:
        self.slots = tuple(Slot(index) for index in range(count))
        self._pages = pages
        self.pinned: set[str] = set()
        self.moves = 0
        """grows with every change of what is in slots, or of its name"""
        self._by_name: dict[str, Slot] = {}
        self._held: dict[int, frozenset[str]] = {}
        self._lru = Lru()
        self._emit = emit

    def get(self, name: str) -> Slot | None:
        return self._by_name.get(name)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self.slots) - len(self._by_name)

    def has_room(self, needs: Needs) -> bool:
        """Whether adapters of these needs can enter without that any leaves."""
        return len(needs) <= self.free and not any(lacking > 0 for lacking in self._lacking(needs).values())

    def users(self, name: str) -> tuple[int, ...]:
        """The running requests that hold `name`."""
        return tuple(user for user, names in self._held.items() if name in names)

    def held(self, user: int) -> frozenset[str]:
        """The adapters that the running request `user` holds."""
        return self._held.get(user, frozenset())

    def plan(self, names: Sequence[str], users: Collection[int], needs: Needs) -> tuple[list[str], dict[str, str]]:
        """(names without a slot, adapters that must leave for them -> for want of what) where `users` will hold no others.

        `needs` has the pages of each name. Changes nothing. Raises MixTooLarge when slots, pages or pins make it impossible, SlotsBusy when
        adapters of other running requests do.
        """
        missing = [name for name in names if name not in self._by_name]
        total = len(self.slots)
        if len(names) > total:
            raise MixTooLarge(f"the mix needs {len(names)} slots, there {'is' if total == 1 else 'are'} {total}; take adapters out of it "
                              f"or start with --slots {len(names)}")
        pinned = sorted(name for name in self.pinned if name in self._by_name and name not in names)
        if len(names) > total - len(pinned):
            raise MixTooLarge(f"the mix needs {len(names)} slots, {len(pinned)} of {total} are pinned to adapters outside it "
                              f"({', '.join(pinned)}); unpin one or take adapters out of the mix")
        self._check_pages(names, needs, pinned)
        others = {other: held for other, held in self._held.items() if other not in users and held}
        protected = frozenset().union(*others.values()) | set(names) | self.pinned
        slots, pages = len(missing) - self.free, self._lacking({name: needs.get(name, {}) for name in missing})
        victims: dict[str, str] = {}
        for name in self._lru:
            short = next((kind for kind, count in self._counts(name).items() if count and pages[kind] > 0), "")
            if name in protected or slots <= 0 and not short:
                continue
            victims[name] = "a slot" if slots > 0 else _pages(pages[short], short, "more ")
            slots -= 1
            pages.subtract(self._counts(name))
        held = f"the rest are held by {requests_text(others)}" + (f" or pinned ({', '.join(pinned)})" if pinned else "")
        if slots > 0:
            raise SlotsBusy(f"the mix needs {len(missing)} more of {total} slots, {len(missing) - slots} can be had now; {held}")
        for kind, lacking in pages.items():
            if lacking > 0:
                wanted = sum(needs.get(name, {}).get(kind, 0) for name in missing)
                raise SlotsBusy(f"the mix needs {_pages(wanted, kind, 'more ')}, {wanted - lacking} can be had now; {held}")
        return missing, victims

    def settle(
        self, names: Sequence[str], arrivals: Sequence[Arrival], victims: Mapping[str, str], holds: Mapping[int, Sequence[str]],
        because: str,
    ) -> list[int]:
        """Carry out a plan for `names`: evict `victims`, place `arrivals`, hold for each user of `holds` those of them that it has there.

        Returns the indexes of the emptied slots.
        """
        emptied = []
        coming = ", ".join(arrival.name for arrival in arrivals)
        for name, lacking in victims.items():
            slot = self._by_name[name]
            emptied.append(slot.index)
            self.remove(name)
            self._emit(SlotEvicted(slot.index, name, f"{coming} needed {lacking} for {because}"))
        held_before = frozenset().union(*map(self.held, holds))
        arrived = {arrival.name for arrival in arrivals}
        for arrival in arrivals:
            self._place(arrival, because)
        for name in names:
            slot = self._by_name[name]
            self._use(name)
            if name not in arrived and name not in held_before:
                self._emit(SlotTouched(slot.index, name))
        for user, held in holds.items():
            self._hold(user, held)
        return emptied

    def release(self, user: int) -> frozenset[str]:
        """The request `user` is over; the adapters that it held."""
        held = self._held.pop(user, frozenset())
        for name in held:
            self._use(name)
        return held

    def remove(self, name: str) -> int:
        """Empty the slot of `name`; the bytes that it took, 0 when it has none."""
        self.moves += 1
        slot = self._by_name.pop(name, None)
        self._lru.remove(name)
        content = slot.clear() if slot else None
        if content is not None and content.pages is not None:
            self._pages.leave(content.pages)
        return content.nbytes if content is not None else 0

    def rename(self, name: str, new: str) -> None:
        """What is in the slot of `name`, and the requests that hold it, go on as `new`; `name` has no slot then."""
        self.moves += 1
        slot = self._by_name.pop(name)
        slot.adapter = new
        self._by_name[new] = slot
        self._lru.remove(name)
        self._lru.touch(new)
        self._held = {user: frozenset(new if held == name else held for held in names) for user, names in self._held.items()}

    def refill(self, name: str, arrival: Arrival | None, because: str) -> None:
        """Other content into the slot that `name` has and no request holds; none where there is none, or needs more pages than are free."""
        slot = self._by_name[name]
        self.remove(name)
        self._emit(SlotEvicted(slot.index, name, because))
        if arrival is not None and (arrival.image is None or self.has_room({name: arrival.image.counts})):
            self._place(arrival, because)

    def views(self) -> tuple[SlotView, ...]:
        now = monotonic()
        return tuple(self._view(slot, now) for slot in self.slots)

    def _view(self, slot: Slot, now: float) -> SlotView:
        if slot.content is None:
            return SlotView(slot.index)
        users = len(self.users(slot.adapter))
        return SlotView(
            slot.index, slot.adapter, slot.content.rank, slot.content.nbytes, slot.adapter in self.pinned, users,
            0.0 if users else now - slot.last_used, sum(self._counts(slot.adapter).values()),
        )

    def _hold(self, user: int, names: Collection[str]) -> None:
        for name in self._held.get(user, frozenset()).difference(names):
            self._use(name)
        if names:
            self._held[user] = frozenset(names)
        else:
            self._held.pop(user, None)

    def _place(self, arrival: Arrival, because: str) -> None:
        self.moves += 1
        slot = next(slot for slot in self.slots if slot.content is None)
        content = arrival.content
        if arrival.image is not None:
            content = content.with_pages(self._pages.enter(arrival.image))
        slot.fill(arrival.name, content)
        self._by_name[arrival.name] = slot
        self._lru.touch(arrival.name)
        self._emit(SlotLoaded(slot.index, arrival.name, content.nbytes, arrival.ms, arrival.source, because))

    def _counts(self, name: str) -> Mapping[str, int]:
        """Pages by kind of what is in the slot of `name`."""
        pages = self._by_name[name].content.pages
        return pages.counts if pages is not None else {}

    def _lacking(self, needs: Needs) -> Counter[str]:
        """By kind, the pages that adapters of these needs take beyond those that are free; negative where enough are."""
        lacking = Counter({kind: -free for kind, free in self._pages.free.items()} if self._pages is not None else {})
        for counts in needs.values():
            lacking.update(counts)
        return lacking

    def _check_pages(self, names: Sequence[str], needs: Needs, pinned: Sequence[str]) -> None:
        for kind in self._pages.free if self._pages is not None else ():
            wanted = sum(needs.get(name, {}).get(kind, 0) for name in names)
            kept = sum(self._counts(name).get(kind, 0) for name in pinned)
            if wanted > (total := self._pages.count):
                raise MixTooLarge(f"the mix needs {_pages(wanted, kind)}, there are {total}; take adapters out of it or start with "
                                  f"--slots {-(-wanted * len(self.slots) // total)}")
            if wanted > total - kept:
                raise MixTooLarge(f"the mix needs {_pages(wanted, kind)}, {kept} of {total} are pinned to adapters outside it "
                                  f"({', '.join(pinned)}); unpin one or take adapters out of the mix")

    def _use(self, name: str) -> None:
        if (slot := self._by_name.get(name)) is not None:
            slot.last_used = monotonic()
            self._lru.touch(name)


def _pages(count: int, kind: str, more: str = "") -> str:
    return f"{count} {more}{'page' if count == 1 else 'pages'} of {kind}"

"""Adapters by name over three tiers: disk, host RAM, device slots. Every move is emitted with its cause."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

import msgspec

from ..kernels.rank_pages import RankPool
from .adapter_read import Progress, ReadAdapter, differences
from .adapter_reader import AdapterReader
from .adapter_records import Record, Records
from .adapter_users import AdapterUsers
from .adapters.adapter import Adapter
from .adapters.errors import AdapterError
from .beside import Work
from .fetches import Fetches, Want
from .invocation import kept_invocation, with_invocation
from .protocol import (
    AdapterChanged,
    AdapterFileChanged,
    AdapterInfo,
    AdapterLoaded,
    AdapterReloaded,
    AdapterUnloaded,
    AdapterUnloading,
    AdapterView,
    Emit,
    HostView,
    Mix,
    PagesView,
    SlotView,
    requests_text,
)
from .routing import Routing
from .tiers import Tiers
from .vocabulary import Vocabulary, vocabulary_of
from .watch import FileState, Watched

if TYPE_CHECKING:
    from .models.decoder import Decoder
    from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Swap:
    """What a reload did: the requests that keep the old content, and its name now ("" when nobody does)."""

    users: tuple[int, ...] = ()
    kept_as: str = ""


class AdapterStore:
    """The adapters of one base.

    Emits AdapterLoaded, AdapterReloaded, AdapterUnloading, AdapterUnloaded, AdapterChanged, AdapterFileChanged, Slot* and Host*
    events; failures are raised (AdapterError, MixTooLarge, SlotsBusy, other ValueError, OSError) and leave everything as it was.
    """

    def __init__(
        self, decoder: Decoder, slots: int, host_bytes: int, emit: Emit, tokenizer: Tokenizer, chat_template: str | None = None,
        forgotten: Callable[[str, str], object] = lambda why, digest: None, wake: Callable[[], None] | None = None, pages: int = 0,
    ) -> None:
        """`forgotten(why, digest)` is called when no name means the content `digest` any more. `wake`: see Fetches;
        `pages`: see Tiers."""
        self._emit, self._tokenizer, self._forgotten = emit, tokenizer, forgotten
        self._base_vocabulary = Vocabulary(tokenizer, decoder.facts.vocab, decoder.facts.vocab)
        self._records = Records()
        self._tiers = Tiers(decoder, self._records, slots, pages, host_bytes, emit)
        self._host, self._pool = self._tiers.host, self._tiers.pool
        self._reader = AdapterReader(decoder.facts, self._tiers, self._base_vocabulary, chat_template)
        self._fetches = Fetches(self._tiers, self._records, decoder.facts, wake)
        self._users = AdapterUsers(self._records, self._pool)
        self._lock = RLock()

    # -- commands ----------------------------------------------------------------------------------
    def load(self, path: str | os.PathLike[str], name: str | None = None) -> AdapterInfo:
        """`read` and `add` in one."""
        return self.add(self.read(path, name), name)

    def read(
        self, path: str | os.PathLike[str], name: str | None = None,
        progress: Progress = lambda done, total: None, cancelled: Callable[[], bool] = lambda: False,
    ) -> ReadAdapter:
        """Read an adapter for this base and keep nothing of it; any thread may. See `AdapterReader.read`."""
        return self._reader.read(path, name, progress, cancelled)

    def add(self, read: ReadAdapter, name: str | None = None) -> AdapterInfo:
        """Take what was read into the host tier under `name`, or a free name made from its folder's.

        Content that is already loaded under that name is a no-op, said in the notes of what is returned and emitted.
        """
        with self._lock:
            name = self._records.choose_name(name, read.adapter.info)
            if name in self._records:
                return self._already_loaded(name, read)
            adapter = self._named(read.adapter, name)
            self._host.check_fits(adapter)
            self._records[name] = Record(
                adapter.info, read.source, vocabulary=read.vocabulary, pages=self._tiers.page_needs(adapter.weights))
            self._host.put(name, adapter, read.ms)
            self._emit(AdapterLoaded(adapter.info, read.ms))
            return adapter.info

    def replace(self, name: str, read: ReadAdapter) -> Swap:
        """Put what was read under `name` in the place of what it held; pin and an invocation set by command stay.

        The requests that hold the old content keep it, under a name of its own, until they end. The same content changes nothing.
        """
        with self._lock:
            record = self._records.known(name)
            if record.leaving:
                raise AdapterError(f"adapter {name!r} is being unloaded, it waits for {requests_text(self._users.of(name))}; "
                                   "load it again after that")
            old, adapter = record.info, self._named(read.adapter, name)
            adapter = replace(adapter, info=kept_invocation(adapter.info, old, record.own_invocation))
            changes = differences(old, adapter.info)
            if _tokens(read.vocabulary) != _tokens(record.vocabulary):
                changes += ("the added tokens",)
            swap = self._swap(name, adapter, read) if changes else Swap()
            self._records[name] = Record(adapter.info, read.source, own_invocation=record.own_invocation, vocabulary=read.vocabulary,
                                         pages=self._tiers.page_needs(adapter.weights))
            self._tell_gone(f"adapter {name!r} was reloaded", old.digest)
            others = self._records.neighbours(name)
            self._emit(AdapterReloaded(adapter.info, old.digest, changes, others, swap.users, swap.kept_as, read.ms))
            return swap

    def unload(self, name: str) -> None:
        """Forget `name` and free its memory, now or when the requests that hold it or wait for it end."""
        with self._lock:
            record = self._records.known(name)
            if record.leaving:
                raise AdapterError(f"adapter {name!r} is already being unloaded; it waits for {requests_text(self._users.of(name))}")
            if users := self._users.of(name):
                record.leaving = True
                self._emit(AdapterUnloading(name, users))
            else:
                self._forget(name)

    def pin(self, name: str, pinned: bool) -> None:
        """Keep `name` in its slot (once it has one) whatever else needs room, or let it go again."""
        with self._lock:
            self._records.known(name)
            (self._pool.pinned.add if pinned else self._pool.pinned.discard)(name)

    def set_invocation(self, name: str, text: str, in_reply: bool = False) -> AdapterInfo:
        """Make `name` an aLoRA that starts at `text`, tokenised by the base; "" makes it a plain LoRA.

        `in_reply`: it also starts where the model itself writes it.
        """
        with self._lock:
            record = self._records.known(name)
            info = with_invocation(record.info, text, in_reply, lambda text: self._tokenizer.encode(text, special=True))
            record.own_invocation = record.own_invocation or text != record.info.invocation
            if info != record.info:
                record.info = info
                self._emit(AdapterChanged(info))
            return info

    def path(self, name: str) -> Path:
        """Where `name` was loaded from. Raises AdapterError for one that is not loaded."""
        return self._records.known(name).source.path

    def watched(self) -> tuple[Watched, ...]:
        return self._records.watched()

    def file_seen(self, watched: Watched, state: FileState) -> None:
        """What a look at the files of an adapter found; said when it is news."""
        record = self._records.get(watched.name)
        if record is None or record.source.stamp != watched.stamp or record.file == state:
            return
        record.file = state
        self._emit(AdapterFileChanged(watched.name, record.info.path, state or "back"))

    def clear(self) -> None:
        """Forget every adapter; no request may use one."""
        with self._lock:
            self._fetches.want(())
            for name in list(self._records):
                self._forget(name)

    # -- requests ----------------------------------------------------------------------------------
    def expect(self, user: int, names: Iterable[str]) -> None:
        """The waiting request `user` will need `names` (in place of what it expected before): an unload waits for it.

        Raises AdapterError for one that is not loaded or is being unloaded.
        """
        self.exchange({}, {user: list(names)}, "")

    def acquire(self, names: Iterable[str], user: int | None, because: str) -> None:
        """Give every adapter of `names` a slot and hold them for the request `user` in place of what it held before.

        `user` None gives slots and holds nothing (a standing mix). `because` completes "needed a slot for ...".
        Raises MixTooLarge, SlotsBusy (try later) or AdapterError.
        """
        wanted = list(dict.fromkeys(names))
        if user is not None:
            self.exchange({user: wanted}, {}, because)
            return
        with self._lock:
            self._users.check_stays({None: wanted})
            self._fetches.give_slots(wanted, {}, because)

    def exchange(self, held: Mapping[int, Sequence[str]], expected: Mapping[int, Sequence[str]], because: str) -> list[str]:
        """`acquire` for the users of `held` (names by user) and `expect` for those of `expected`, or nothing of it. Raises as they do.
        Returns those of `held` whose pages are still being filled: a step that uses them waits for that, with all that are in it."""
        with self._lock:
            self._users.check_stays({**held, **expected})
            if held:
                self._fetches.give_slots(list(dict.fromkeys(chain(*held.values()))), held, because)
            self._users.begun(held)
            for user, names in expected.items():
                self._users.expect(user, names)
            self._finish_unloads()
            return self._tiers.arriving(chain(*held.values()))

    def wait_again(self, user: int) -> None:
        """The request `user` waits and holds nothing any more; it will need what it held."""
        with self._lock:
            self._users.wait_again(user)

    def held(self, user: int) -> frozenset[str]:
        """What the running request `user` holds."""
        return self._pool.held(user)

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that must be read from disk or made ready, beside the loop, before they can have slots."""
        with self._lock:
            return self._fetches.lacking(names)

    def on_disk(self, names: Iterable[str]) -> list[str]:
        """Those of `lacking` that must be read from disk."""
        with self._lock:
            return self._fetches.on_disk(names)

    def settle(self) -> None:
        """Take in what was read or made ready beside the loop."""
        with self._lock:
            self._fetches.settle()

    def want(self, wanted: Iterable[Want]) -> None:
        """Who waits for adapters now, in place of who waited before; see Fetches."""
        with self._lock:
            self._fetches.want(wanted)

    def in_slots(self, names: Iterable[str]) -> bool:
        """Whether all of them are in slots, so that nothing need be moved for them."""
        return all(self._pool.get(name) is not None for name in names)

    def holds(self, name: str, digest: str) -> bool:
        """Whether `name` is loaded and still means the content `digest`."""
        return name in self._records and self._records[name].info.digest == digest

    def check_holds(self, acting: Mapping[str, str]) -> None:
        """Raises LookupError for the first name of `acting` (name -> digest) that no longer `holds`."""
        for name, digest in acting.items():
            if not self.holds(name, digest):
                raise LookupError(f"adapter {name!r} holds other content than a request began with; start that request again")

    def release(self, user: int) -> None:
        """The request `user` is over: its adapters may be evicted, and those being unloaded go if nobody else needs them."""
        with self._lock:
            self._users.over(user)
            self._finish_unloads()

    def rehearsal(self) -> Routing | None:
        """What steps of prompts are warmed up with (see RoutingCache.rehearsal)."""
        return self._tiers.rehearsal()

    def routing(self, names: Iterable[str]) -> Routing | None:
        """The composition of adapters that are in slots, in the order of their digests; None without any."""
        return self._tiers.routing(sorted(set(names), key=lambda name: (self._records[name].info.digest, name)))

    # -- views -------------------------------------------------------------------------------------
    @property
    def infos(self) -> Mapping[str, AdapterInfo]:
        """What is loaded, by name, in the order of loading."""
        return self._records.infos()

    def infos_for(self, user: int | None) -> Mapping[str, AdapterInfo]:
        """`infos` as the request `user` has them: a name that was reloaded while it ran means the old content, by its name now."""
        return self._users.infos(user)

    def vocabulary(self, mix: Mix, user: int | None) -> Vocabulary:
        """The tokens of the request `user` (None: of one that is to come) under `mix`.

        Raises MixError when two adapters add different ones.
        """
        infos = self.infos_for(user)
        records = [self._records[infos[use.name].name] for use in mix if use.scale != 0 and use.name in infos]
        return vocabulary_of(self._base_vocabulary, [(record.info.name, record.vocabulary) for record in records if record.vocabulary])

    def adapter(self, name: str) -> Adapter:
        """The loaded content of `name`: of the host tier, else read again from disk, entering no tier. Raises AdapterError."""
        return self.reader(name)(lambda done, total: None, lambda: False)

    def reader(self, name: str) -> Work[Adapter]:
        """What has the loaded content of `name`, as `adapter` does; any thread may call it."""
        with self._lock:
            self._records.known(name)
            adapter, read = self._host.get(name), self._fetches.read_again(name)
        return lambda progress, cancelled: adapter or read(progress, cancelled).adapter

    def text(self, ids: Sequence[int]) -> str:
        """Token ids as the base writes them, special tokens included."""
        return self._tokenizer.decode(ids, special=True)

    def adapter_views(self) -> tuple[AdapterView, ...]:
        return tuple(self._view(name, record) for name, record in self._records.items() if not record.replaced)

    def slot_views(self) -> tuple[SlotView, ...]:
        return self._pool.views()

    @property
    def moves(self) -> int:
        """As long as it is the same, so is the `routing` of the same names."""
        return self._pool.moves

    @property
    def page_pools(self) -> Mapping[str, RankPool]:
        """Where the pages lie on the device, by kind of fused linear; none where adapters have no pages."""
        return self._tiers.pages.pools if self._tiers.pages is not None else {}

    def page_views(self) -> tuple[PagesView, ...]:
        return self._tiers.pages.views() if self._tiers.pages is not None else ()

    def host_view(self) -> HostView:
        return self._host.view()

    @property
    def composed_bytes(self) -> int:
        """Device bytes of adapters laid end to end for steps that use several at once, beside the slots."""
        return self._tiers.composed_bytes

    # -- inside ------------------------------------------------------------------------------------
    def _already_loaded(self, name: str, read: ReadAdapter) -> AdapterInfo:
        record = self._records[name]
        if record.leaving:
            raise AdapterError(f"adapter {name!r} is being unloaded, it waits for {requests_text(self._users.of(name))}; "
                               "load it again after that")
        if record.source.files == read.source.files:
            record.source, record.file = read.source, ""
        info = msgspec.structs.replace(record.info, notes=(*record.info.notes, f"was already loaded as {name!r} with the same content"))
        self._emit(AdapterLoaded(info, read.ms))
        return info

    def _named(self, adapter: Adapter, name: str) -> Adapter:
        info = msgspec.structs.replace(adapter.info, name=name)
        notes = (*info.notes, *self._records.twins_note(info))
        invocation = self.text(info.invocation_tokens) if info.invocation_tokens else ""
        return replace(adapter, info=msgspec.structs.replace(info, notes=notes, invocation=invocation))

    def _swap(self, name: str, adapter: Adapter, read: ReadAdapter) -> Swap:
        """All tiers from the old content of `name` to `adapter`; its users keep the old one under another name."""
        self._fetches.drop(name)
        users, kept_as = self._tiers.swap(name, adapter, read.ms, read.ready, lambda: self._records.set_aside(name))
        if read.ready and not self.in_slots([name]):
            self._fetches.offer(name, read.ready)
        self._users.keep(users, name, kept_as)
        return Swap(users, kept_as)

    def _finish_unloads(self) -> None:
        for name in self._users.leavers():
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._fetches.drop(name)
        freed = self._tiers.forget(name)
        gone = self._records.pop(name)
        self._users.forget(name)
        self._emit(AdapterUnloaded(name, freed))
        self._tell_gone(f"adapter {name!r} was unloaded", gone.info.digest)

    def _tell_gone(self, why: str, digest: str) -> None:
        if all(record.info.digest != digest for record in self._records.values()):
            self._forgotten(why, digest)

    def _view(self, name: str, record: Record) -> AdapterView:
        return AdapterView(record.info, *self._tiers.place(name), name in self._pool.pinned, record.file, name == self._fetches.reading)


def _tokens(vocabulary: Vocabulary | None) -> Mapping[str, tuple[int, bool]]:
    return vocabulary.tokens if vocabulary else {}

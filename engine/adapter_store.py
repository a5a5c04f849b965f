"""Adapters by name over three tiers: disk, host RAM, device slots. Every move is emitted with its cause."""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import torch

from .adapters.adapter import Adapter
from .adapters.config import MAX_INVOCATION
from .adapters.errors import AdapterError
from .adapters.load import load_adapter
from .adapters.open import open_adapter
from .host_cache import HostCache
from .mix import unknown_adapter
from .models.facts import ModelFacts, module_shapes
from .protocol import (
    AdapterChanged,
    AdapterInfo,
    AdapterLoaded,
    AdapterUnloaded,
    AdapterUnloading,
    AdapterView,
    Emit,
    HostView,
    SlotView,
)
from .routing import Routing, RoutingCache
from .slot_pool import Arrival, SlotPool
from .slots import build_content, fused_modules

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@dataclass(slots=True)
class _Record:
    """What is known of a name while its tensors may be in any tier."""

    info: AdapterInfo
    path: Path
    leaving: bool = False


class AdapterStore:
    """The adapters of one base.

    Emits AdapterLoaded, AdapterUnloading, AdapterUnloaded, AdapterChanged, Slot* and Host* events; failures are raised
    (AdapterError, MixTooLarge, SlotsBusy, other ValueError, OSError) and leave everything as it was.
    """

    def __init__(
        self, facts: ModelFacts, device: torch.device, dtype: torch.dtype, slots: int, host_bytes: int, emit: Emit, tokenizer: Tokenizer,
    ) -> None:
        self._facts, self._device, self._dtype, self._emit, self._tokenizer = facts, device, dtype, emit, tokenizer
        self._records: dict[str, _Record] = {}
        self._host = HostCache(host_bytes, emit)
        self._pool = SlotPool(slots, emit)
        shapes = module_shapes(facts)
        outputs = {key: [shapes[module][0] for module in modules] for key, modules in fused_modules(facts).items()}
        self._routings = RoutingCache(facts.layers, outputs, device)
        self._queued: dict[int, frozenset[str]] = {}
        """what waiting requests will need"""
        self._lock = RLock()

    # -- commands ----------------------------------------------------------------------------------
    def load(self, path: str | os.PathLike[str], name: str | None = None) -> AdapterInfo:
        """Read an adapter into the host tier under `name`, or a free name made from its folder's.

        Content that is already loaded under that name is a no-op, said in the notes of what is returned and emitted.
        """
        with self._lock:
            began = perf_counter()
            if name is not None and not name.strip():
                raise AdapterError(f"{os.fspath(path)}: an adapter cannot have an empty name; give one or leave it out")
            file = open_adapter(path)
            adapter = load_adapter(file, self._facts, name or file.default_name)
            name = self._choose_name(name, adapter)
            if name in self._records:
                return self._already_loaded(name, began)
            adapter = self._named(adapter, name)
            self._host.check_fits(adapter)
            ms = _ms_since(began)
            self._records[name] = _Record(adapter.info, file.path.absolute())
            self._host.put(name, adapter, ms)
            self._emit(AdapterLoaded(adapter.info, ms))
            return adapter.info

    def unload(self, name: str) -> None:
        """Forget `name` and free its memory, now or when the requests that hold it or wait for it end."""
        with self._lock:
            record = self._record(name)
            if record.leaving:
                raise AdapterError(f"adapter {name!r} is already being unloaded; it waits for {_requests(self._users(name))}")
            if users := self._users(name):
                record.leaving = True
                self._emit(AdapterUnloading(name, users))
            else:
                self._forget(name)

    def pin(self, name: str, pinned: bool) -> None:
        """Keep `name` in its slot (once it has one) whatever else needs room, or let it go again."""
        with self._lock:
            self._record(name)
            (self._pool.pinned.add if pinned else self._pool.pinned.discard)(name)

    def set_invocation(self, name: str, text: str) -> AdapterInfo:
        """Make `name` an aLoRA that starts at `text`, tokenised by the base; "" makes it a plain LoRA."""
        with self._lock:
            record = self._record(name)
            if text == record.info.invocation:
                return record.info  # the adapter's own ids stay: its text may be tokenised otherwise
            tokens = tuple(self._tokenizer.encode(text, special=True)) if text else ()
            if text and not tokens:
                raise AdapterError(f"the invocation {text!r} of adapter {name!r} has no tokens in this base; give another text")
            if len(tokens) > MAX_INVOCATION:
                raise AdapterError(f"the invocation of adapter {name!r} has {len(tokens)} tokens, over the limit of {MAX_INVOCATION}; "
                                   "give a shorter text")
            record.info = msgspec.structs.replace(record.info, invocation=text, invocation_tokens=tokens)
            self._emit(AdapterChanged(record.info))
            return record.info

    def clear(self) -> None:
        """Forget every adapter; no request may use one."""
        with self._lock:
            for name in list(self._records):
                self._forget(name)

    # -- requests ----------------------------------------------------------------------------------
    def expect(self, user: int, names: Iterable[str]) -> None:
        """The waiting request `user` will need `names` (in place of what it expected before): an unload waits for it.

        Raises AdapterError for one that is not loaded or is being unloaded.
        """
        with self._lock:
            wanted = frozenset(names)
            for name in wanted:
                self._check_stays(name, user)
            self._queued[user] = wanted
            self._finish_unloads()

    def acquire(self, names: Iterable[str], user: int | None, because: str) -> None:
        """Give every adapter of `names` a slot and hold them for the request `user` in place of what it held before.

        `user` None gives slots and holds nothing (a standing mix). `because` completes "needed a slot for ...".
        New adapters are on the device before any is evicted. Raises MixTooLarge, SlotsBusy (try later) or AdapterError.
        """
        with self._lock:
            wanted = list(dict.fromkeys(names))
            for name in wanted:
                self._check_stays(name, user)
            missing, victims = self._pool.plan(wanted, user)
            fetched = [self._fetch(name) for name in missing]
            arrivals = [arrival for arrival, _ in fetched]
            for slot in self._pool.settle(wanted, arrivals, victims, user, because):
                self._routings.forget(slot)
            for arrival, adapter in fetched:
                if arrival.source == "disk":
                    self._host.put(arrival.name, adapter, arrival.ms)
            if user is not None:
                self._queued.pop(user, None)
            self._finish_unloads()

    def release(self, user: int) -> None:
        """The request `user` is over: its adapters may be evicted, and those being unloaded go if nobody else needs them."""
        with self._lock:
            self._queued.pop(user, None)
            self._pool.release(user)
            self._finish_unloads()

    def routing(self, names: Iterable[str]) -> Routing | None:
        """The composition of adapters that are in slots, in the order of their digests; None without any."""
        ordered = sorted(set(names), key=lambda name: (self._records[name].info.digest, name))
        slots = [slot for name in ordered if (slot := self._pool.get(name)) is not None]
        if len(slots) != len(ordered):
            raise LookupError(f"of the adapters {ordered} only {[slot.adapter for slot in slots]} are in slots; acquire them first")
        return self._routings.get(slots) if slots else None

    # -- views -------------------------------------------------------------------------------------
    @property
    def infos(self) -> Mapping[str, AdapterInfo]:
        """What is loaded, by name, in the order of loading."""
        return {name: record.info for name, record in self._records.items()}

    def text(self, ids: Sequence[int]) -> str:
        """Token ids as the base writes them, special tokens included."""
        return self._tokenizer.decode(ids, special=True)

    def adapter_views(self) -> tuple[AdapterView, ...]:
        return tuple(self._view(name, record.info) for name, record in self._records.items())

    def slot_views(self) -> tuple[SlotView, ...]:
        return self._pool.views()

    def host_view(self) -> HostView:
        return self._host.view()

    @property
    def composed_bytes(self) -> int:
        """Device bytes of adapters laid end to end for steps that use several at once, beside the slots."""
        return self._routings.copied_bytes

    # -- inside ------------------------------------------------------------------------------------
    def _record(self, name: str) -> _Record:
        if name not in self._records:
            raise AdapterError(unknown_adapter(name, self._records))
        return self._records[name]

    def _users(self, name: str) -> tuple[int, ...]:
        """The requests that hold `name`, then those that wait for it."""
        return (*self._pool.users(name), *(user for user, names in self._queued.items() if name in names))

    def _check_stays(self, name: str, user: int | None) -> None:
        if self._record(name).leaving and user not in self._users(name):
            raise AdapterError(f"adapter {name!r} is being unloaded; load it again once that is done")

    def _choose_name(self, given: str | None, adapter: Adapter) -> str:
        """`given`, or the first of name, name-2, name-3, ... that is free or already holds this content."""
        digest = adapter.info.digest
        if given is not None:
            record = self._records.get(given)
            if record is not None and record.info.digest != digest:
                raise AdapterError(f"{adapter.info.path}: the name {given!r} is taken by other content ({record.info.path}); "
                                   "unload that first or choose another name")
            return given
        base = name = adapter.info.name
        number = 1
        while name in self._records and self._records[name].info.digest != digest:
            number += 1
            name = f"{base}-{number}"
        return name

    def _already_loaded(self, name: str, began: float) -> AdapterInfo:
        record = self._records[name]
        if record.leaving:
            raise AdapterError(f"adapter {name!r} is being unloaded, it waits for {_requests(self._users(name))}; "
                               "load it again after that")
        info = msgspec.structs.replace(record.info, notes=(*record.info.notes, f"was already loaded as {name!r} with the same content"))
        self._emit(AdapterLoaded(info, _ms_since(began)))
        return info

    def _named(self, adapter: Adapter, name: str) -> Adapter:
        info = adapter.info
        notes = info.notes
        twins = [other for other, record in self._records.items() if record.info.digest == info.digest]
        if twins:
            notes = (*notes, f"the same content as {', '.join(map(repr, twins))}")
        invocation = self.text(info.invocation_tokens) if info.invocation_tokens else ""
        return Adapter(msgspec.structs.replace(info, name=name, notes=notes, invocation=invocation), adapter.weights)

    def _fetch(self, name: str) -> tuple[Arrival, Adapter]:
        """`name` on the device, from the host tier or read again from disk and proved to be the same."""
        began = perf_counter()
        adapter = self._host.get(name)
        source = "disk" if adapter is None else "host"
        if adapter is None:
            adapter = self._read_again(name)
        content = build_content(adapter, self._facts, self._device, self._dtype)
        return Arrival(name, content, source, _ms_since(began)), adapter

    def _read_again(self, name: str) -> Adapter:
        record = self._records[name]
        try:
            adapter = load_adapter(open_adapter(record.path), self._facts, name)
        except (ValueError, OSError) as error:
            raise AdapterError(f"adapter {name!r} is no longer in memory and cannot be read again: {error}") from error
        if adapter.info.digest != record.info.digest:
            raise AdapterError(f"adapter {name!r} is no longer in memory and {record.path} has changed since it was loaded; "
                               "unload it and load the new content")
        return adapter

    def _finish_unloads(self) -> None:
        for name in [name for name, record in self._records.items() if record.leaving and not self._users(name)]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        if (slot := self._pool.get(name)) is not None:
            self._routings.forget(slot.index)
        freed = self._pool.remove(name) + self._host.drop(name)
        self._pool.pinned.discard(name)
        del self._records[name]
        self._emit(AdapterUnloaded(name, freed))

    def _view(self, name: str, info: AdapterInfo) -> AdapterView:
        slot = self._pool.get(name)
        tier = "slot" if slot is not None else "host" if name in self._host else "disk"
        return AdapterView(info, tier, slot.index if slot is not None else -1, name in self._pool.pinned)


def _ms_since(began: float) -> float:
    return (perf_counter() - began) * 1000


def _requests(users: Sequence[int]) -> str:
    return "request " + ", ".join(map(str, users))

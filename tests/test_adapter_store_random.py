"""Random commands to the store of adapters, against a naive model that keeps sets."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from properties import check
from safetensors.torch import save_file
from store_bench import BYTES, StoreBench

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.protocol import (
    AdapterUnloaded,
    HostEvicted,
    HostLoaded,
    SlotEvicted,
    SlotLoaded,
)
from lora_bench.engine.slot_pool import MixTooLarge, SlotsBusy

NAMES = st.sampled_from("abcd")
USERS = st.integers(1, 3)


class StoreMachine(RuleBasedStateMachine):
    """Three slots, a host tier of two adapters, four adapters, three requests. The model keeps sets and checks promises, not order."""

    folder: Path
    facts: ModelFacts

    @initialize()
    def begin(self) -> None:
        self.bench = StoreBench(self.facts, slots=3, host_bytes=2 * BYTES)
        self.loaded: set[str] = set()
        self.leaving: set[str] = set()
        self.pinned: set[str] = set()
        self.held: dict[int, set[str]] = {}

    def _users(self, name: str) -> list[int]:
        return [user for user, names in self.held.items() if name in names]

    def _settle(self) -> None:
        gone = {name for name in self.leaving if not self._users(name)}
        self.leaving -= gone
        self.loaded -= gone
        self.pinned -= gone

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        if name in self.leaving:
            with pytest.raises(AdapterError):
                self.bench.store.load(self.folder / name, name)
        else:
            self.bench.store.load(self.folder / name, name)
            self.loaded.add(name)

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        if name not in self.loaded or name in self.leaving:
            with pytest.raises(AdapterError):
                self.bench.store.unload(name)
            return
        self.bench.store.unload(name)
        self.leaving.add(name)
        self._settle()

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if name in self.loaded:
            self.bench.store.pin(name, pinned)
            (self.pinned.add if pinned else self.pinned.discard)(name)

    @rule(names=st.sets(NAMES, max_size=4), user=st.none() | USERS)
    def acquire(self, names: set[str], user: int | None) -> None:
        store = self.bench.store
        before = {view.adapter for view in store.slot_views()} - {""}
        in_use = set().union(*(held for other, held in self.held.items() if other != user))
        fixed = (in_use | (self.pinned & before)) - names
        unknown = any(name not in self.loaded or (name in self.leaving and user not in self._users(name)) for name in names)
        if unknown or len(names) + len(fixed & before) > 3:
            events = len(self.bench.events)
            with pytest.raises((AdapterError, MixTooLarge, SlotsBusy)):
                store.acquire(names, user, "a test")
            assert len(self.bench.events) == events
            return
        store.acquire(names, user, "a test")
        after = {view.adapter for view in store.slot_views()} - {""}
        if user is not None:
            self.held[user] = set(names)
        self._settle()
        assert names - set(store.infos) <= set() and names & set(store.infos) <= after
        assert (fixed & before & self.loaded) <= after

    @rule(user=USERS)
    def release(self, user: int) -> None:
        self.bench.store.release(user)
        self.held.pop(user, None)
        self._settle()

    @invariant()
    def promises_hold(self) -> None:
        if not hasattr(self, "bench"):
            return
        store = self.bench.store
        assert set(store.infos) == self.loaded
        resident = {view.adapter: view for view in store.slot_views() if view.adapter}
        assert set(resident) <= self.loaded
        for name, view in resident.items():
            assert view.users == len(self._users(name)) and view.pinned == (name in self.pinned)
        assert all(name in resident for names in self.held.values() for name in names)
        host = store.host_view()
        assert host.used_bytes == len(host.adapters) * BYTES <= host.limit_bytes and set(host.adapters) <= self.loaded
        for view in store.adapter_views():
            expected = "slot" if view.info.name in resident else "host" if view.info.name in host.adapters else "disk"
            assert view.tier == expected
        if resident:
            assert store.routing(resident) is not None

    @invariant()
    def events_tell_the_same_story(self) -> None:
        if not hasattr(self, "bench"):
            return
        slots, host = {}, set()
        for event in self.bench.events:
            match event:
                case SlotLoaded():
                    assert event.slot not in slots
                    slots[event.slot] = event.adapter
                case SlotEvicted():
                    assert slots.pop(event.slot) == event.adapter
                case HostLoaded():
                    host.add(event.adapter)
                case HostEvicted():
                    host.remove(event.adapter)
                case AdapterUnloaded():
                    slots = {slot: name for slot, name in slots.items() if name != event.name}
                    host.discard(event.name)
        store = self.bench.store
        assert slots == {view.slot: view.adapter for view in store.slot_views() if view.adapter}
        assert host == set(store.host_view().adapters)


def test_random_commands_keep_every_promise(tmp_path: Path, tiny_facts: ModelFacts) -> None:
    for name in "abcd":
        (tmp_path / name).mkdir()
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        save_file({f"base_model.model.model.layers.{layer}.self_attn.{kind}_proj.lora_{half}.weight": torch.randn(shape)
                   for layer in range(2) for kind, out in (("q", 36), ("v", 12)) for half, shape in (("A", (4, 24)), ("B", (out, 4)))},
                  tmp_path / name / "adapter_model.safetensors")
    StoreMachine.folder, StoreMachine.facts = tmp_path, tiny_facts
    check(StoreMachine, 50, steps=30)

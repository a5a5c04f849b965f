"""Adapters read and made ready beside the loop for those who wait: in order, kept for them, told with their cause."""
from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from store_bench import BYTES, StoreBench

from lora_bench.engine import fetches, tiers
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.beside import Beside
from lora_bench.engine.fetches import Want
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.protocol import AdapterUnloaded, HostEvicted, HostLoaded, SlotEvicted, SlotLoaded
from lora_bench.engine.slot_pool import SlotsBusy

Folder = Callable[..., Path]
Make = Callable[..., "Fetching"]


class Fetching(StoreBench):
    """A store whose work wakes `news`; `names` are loaded, what does not fit into the host tier lies on disk."""

    def __init__(self, facts: ModelFacts, folders: dict[str, Path], slots: int, host: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.news = threading.Event()
        self.works: list[Beside[Any]] = []
        works = self.works

        class Kept(Beside[Any]):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                works.append(self)

        monkeypatch.setattr(fetches, "Beside", Kept)
        super().__init__(facts, slots, host * BYTES, wake=self.news.set)
        for name, folder in folders.items():
            self.store.load(folder, name)
        self.events.clear()

    def want(self, *wanted: Sequence[str]) -> None:
        self.store.want([Want(names, f"request {number}, which waits") for number, names in enumerate(wanted, 1)])

    def step(self, *wanted: Sequence[str]) -> list[str]:
        """Tell who waits, and let what goes on then come to its end: "a read", "b made"."""
        self.want(*wanted)
        before, reading = self.store.lacking(self.store.infos), [view.info.name for view in self.store.adapter_views() if view.reading]
        while any(work.outcome is None for work in self.works):
            assert self.news.wait(10)
            self.news.clear()
        self.works.clear()
        self.store.settle()
        left = self.store.lacking(self.store.infos)
        return [*(f"{name} read" for name in reading), *(f"{name} made" for name in before if name not in left and name not in reading)]

    def steps(self, *wanted: Sequence[str]) -> list[str]:
        """All that is done for them until nothing is left to do."""
        done = []
        while step := self.step(*wanted):
            done += step
        return done

    def take(self, names: str, user: int) -> None:
        """Slots for one who waits first."""
        self.steps(names)
        self.store.acquire(names, user, f"request {user}")


@pytest.fixture
def make(tiny_facts: ModelFacts, adapter_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Make:
    def build(names: str, slots: int, host: int) -> Fetching:
        return Fetching(tiny_facts, {name: adapter_folder(name) for name in names}, slots, host, monkeypatch)

    return build


def test_those_who_wait_get_their_adapters_in_their_order_and_keep_them(make: Make) -> None:
    bench = make("abcd", slots=1, host=2)
    bench.take("d", 9)
    assert bench.store.lacking("abcd") == ["a", "b", "c"] and bench.store.on_disk("abcd") == ["a", "b"]
    bench.events.clear()
    assert bench.steps("b", "a", "c") == ["b read", "c made", "a read", "b made"], "there is no room for a third"
    assert bench.tiers() == {"a": "host", "b": "host", "c": "disk", "d": "slot"} and bench.store.lacking("ab") == ["a"]
    assert [(event.adapter, event.because) for event in bench.seen(HostLoaded)] == [
        ("b", "request 1, which waits"), ("a", "request 2, which waits")]
    assert {event.adapter for event in bench.seen(HostEvicted)} == {"c", "d"}
    bench.store.release(9)
    bench.store.acquire("b", 1, "its turn")
    bench.store.release(1)
    assert bench.steps("a", "c") == ["c read", "a made"]
    bench.store.acquire("a", 2, "its turn")
    assert [event.source for event in bench.seen(SlotLoaded)] == ["host", "host"]


def test_what_someone_waits_for_is_kept_longer_than_what_was_used_since(make: Make) -> None:
    bench = make("abcd", slots=2, host=2)
    bench.take("d", 9)
    assert bench.step("a") == ["a read"]
    bench.store.adapter("d")
    assert bench.store.host_view().adapters == ("a", "d")
    assert bench.steps("a", "b") == ["b read", "a made", "b made"] and bench.store.on_disk("ab") == []
    assert bench.store.adapter("c").info.name == "c" and bench.store.on_disk("ab") == [], "a check reads for itself"


def test_an_earlier_one_takes_the_room_of_what_was_read_for_a_later_one(make: Make) -> None:
    bench = make("abc", slots=1, host=1)
    bench.take("c", 9)
    assert bench.step("a") == ["a read"]
    assert bench.step("b", "a") == ["b read", "a made"] and bench.tiers()["a"] == "disk" and bench.tiers()["b"] == "host"


def test_who_waits_behind_a_read_is_made_ready_meanwhile(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, gate, real = make("abc", slots=1, host=2), threading.Event(), fetches.read_again
    bench.take("b", 9)
    monkeypatch.setattr(fetches, "read_again", lambda *arguments: gate.wait(10) and real(*arguments))
    bench.want("a", "c", "b")
    while bench.works[-1].outcome is None:  # that of c: a is read first
        bench.news.wait(10)
        bench.news.clear()
    bench.store.settle()
    assert bench.store.lacking("abc") == ["a"]
    gate.set()
    bench.step("a", "c")


def test_a_load_by_command_has_its_room_all_the_same(make: Make, adapter_folder: Folder) -> None:
    bench = make("abc", slots=1, host=1)
    bench.take("c", 9)
    assert bench.step("a") == ["a read"]
    bench.store.load(adapter_folder("e"), "e")
    assert bench.tiers()["e"] == "host" and bench.store.on_disk("a") == ["a"]
    assert bench.step("a") == ["a read"] and bench.store.on_disk("a") == []


@pytest.mark.parametrize("order", ["dab", "abd", "bda"])
def test_the_first_gets_a_mix_larger_than_the_host_tier(order: str, make: Make) -> None:
    bench = make("abcde", slots=3, host=1)
    for user, name in enumerate("edc", 7):
        bench.take(name, user)
    done = bench.steps(order, "c")
    assert sorted(done) == ["a made", "a read", "b made", "b read"] and bench.store.host_view().used_bytes <= BYTES
    for user in (7, 9):
        bench.store.release(user)
    bench.store.acquire(order, 1, "request 1")
    assert bench.store.routing(order) is not None


def test_a_group_whose_adapters_are_together_larger_than_the_host_tier_gets_them(make: Make) -> None:
    bench = make("abc", slots=2, host=1)
    bench.take("c", 9)
    bench.take("b", 8)
    bench.store.release(9)
    bench.store.release(8)
    bench.steps("abc"[:2])
    bench.store.exchange({1: ["a"], 2: ["b"]}, {}, "requests 1, 2")
    assert bench.tiers()["a"] == bench.tiers()["b"] == "slot"


def test_what_cannot_be_read_is_told_to_who_wants_it_and_tried_again_for_the_next(make: Make, adapter_folder: Folder) -> None:
    bench = make("abc", slots=1, host=1)
    away = bench.store.path("a").rename(bench.store.path("a").with_name("away"))
    before = bench.store.path("b").with_name("before")
    shutil.copytree(bench.store.path("b"), before)
    adapter_folder("b")  # other weights under the same path
    for name, words in (("a", "cannot be read again: .*no such file"), ("b", "has changed since it was loaded; reload it")):
        assert bench.steps(name) == [f"{name} read"] and bench.store.lacking(name) == []
        for _ in range(2):
            with pytest.raises(AdapterError, match=f"adapter '{name}' is no longer in memory and .*{words}"):
                bench.store.acquire(name, 1, "request 1")
    assert bench.tiers()["c"] == "host", "nothing left for them"
    bench.want()
    assert bench.store.lacking("ab") == ["a", "b"]
    away.rename(bench.store.path("a"))
    shutil.rmtree(bench.store.path("b"))
    before.rename(bench.store.path("b"))
    for name in "ab":
        bench.take(name, 1)
        bench.store.release(1)


def test_what_cannot_be_made_ready_is_told_to_who_wants_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make("ab", slots=1, host=2)

    def fails(*_: object) -> object:
        raise AdapterError("a: its numbers are too large")

    with monkeypatch.context() as patched:
        patched.setattr(tiers, "build_content", fails)
        bench.steps("a", "b")
        with pytest.raises(AdapterError, match="too large"):
            bench.store.acquire("a", 1, "request 1")
    bench.want()
    bench.take("a", 1)


def test_free_slots_are_filled_beforehand_and_nobody_is_evicted(make: Make) -> None:
    bench = make("abcde", slots=3, host=5)
    bench.take("e", 9)
    bench.store.release(9)
    assert bench.steps("a", "b", "cd", "c") == ["a made", "b made", "c made", "d made"]
    assert [event.because for event in bench.seen(SlotLoaded)][1:] == ["request 1, which waits", "request 2, which waits"]
    assert not bench.seen(SlotEvicted) and bench.tiers() == {"a": "slot", "b": "slot", "c": "host", "d": "host", "e": "slot"}


def test_a_free_slot_is_left_to_the_first_whose_adapter_is_still_read(make: Make) -> None:
    bench = make("ab", slots=1, host=1)
    assert bench.step("a", "b") == ["a read", "b made"] and not bench.seen(SlotLoaded)
    bench.steps("a", "b")
    assert [event.adapter for event in bench.seen(SlotLoaded)] == ["a"]


def test_what_is_not_ready_gets_no_slot_and_nothing_is_done_where_it_is_asked_for(make: Make) -> None:
    bench = make("ab", slots=2, host=1)
    for name in "ab":
        with pytest.raises(SlotsBusy, match=f"adapter '{name}' must be made ready"):
            bench.store.acquire(name, 1, "request 1")
    assert not bench.events and bench.tiers() == {"a": "disk", "b": "host"}


@pytest.mark.parametrize("happens", ["nobody wants it", "it is unloaded", "it is reloaded"])
def test_what_is_not_wanted_any_more_is_dropped(happens: str, make: Make, adapter_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real, given_up = threading.Event(), fetches.read_again, threading.Event()

    def read(*arguments: object) -> object:
        assert gate.wait(10)
        given_up.set()
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fetches, "read_again", read)
    bench = make("ab", slots=1, host=1)
    bench.want("a")
    match happens:
        case "nobody wants it":
            bench.want()
            assert not any(view.reading for view in bench.store.adapter_views())
        case "it is unloaded":
            bench.store.unload("a")
            assert bench.seen(AdapterUnloaded)
        case "it is reloaded":
            adapter_folder("a")
            bench.store.replace("a", bench.store.read(bench.store.path("a"), "a"))
    bench.events.clear()
    before = bench.tiers()
    gate.set()
    assert given_up.wait(10)
    bench.news.wait(2)
    bench.store.settle()
    bench.want()
    assert bench.tiers() == before and not bench.events
    assert bench.store.host_view().used_bytes == BYTES * len(bench.store.host_view().adapters)


def test_what_was_made_ready_of_content_that_is_reloaded_does_not_act(make: Make, adapter_folder: Folder) -> None:
    bench = make("ab", slots=1, host=2)
    bench.take("b", 9)
    assert bench.step("a") == ["a made"]
    adapter_folder("a")
    bench.store.replace("a", bench.store.read(bench.store.path("a"), "a"))
    assert bench.store.lacking("a") == ["a"]


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_first_gets_its_slots_whatever_else_is_wanted(seed: int, make: Make) -> None:
    draw = random.Random(seed)
    bench = make("abcdef", slots=draw.randint(2, 4), host=draw.randint(1, 4))
    queue = ["".join(draw.sample("abcdef", draw.randint(1, 2))) for _ in range(12)]
    worked = 0
    while queue:
        done = bench.step(*queue)
        worked += bool(done)
        assert worked <= 100, "it works in circles"
        view = bench.store.host_view()
        assert view.used_bytes == BYTES * len(view.adapters) <= view.limit_bytes
        if not bench.store.lacking(queue[0]):
            bench.store.acquire(queue.pop(0), 1, "request 1")
            bench.store.release(1)
            if draw.random() < 0.3:
                draw.shuffle(queue)
        else:
            assert done, "nothing is done for the first"

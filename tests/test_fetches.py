"""Adapters that lie on disk only, read beside the loop for those who wait: in order, kept for them, told with their cause."""
from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from store_bench import BYTES, StoreBench

from lora_bench.engine import fetches
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.fetches import Want
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.protocol import AdapterUnloaded, HostEvicted, HostLoaded, SlotEvicted, SlotLoaded

Folder = Callable[..., Path]
Make = Callable[..., "Fetching"]


class Fetching(StoreBench):
    """A store whose reads wake `news`; `names` are loaded, what does not fit into the host tier lies on disk."""

    def __init__(self, facts: ModelFacts, folders: dict[str, Path], slots: int, host: int) -> None:
        self.news = threading.Event()
        super().__init__(facts, slots, host * BYTES, wake=self.news.set)
        for name, folder in folders.items():
            self.store.load(folder, name)
        self.events.clear()

    def want(self, *wanted: Sequence[str]) -> None:
        self.store.want([Want(names, f"request {number}, which waits") for number, names in enumerate(wanted, 1)])

    def read(self) -> str:
        """Let the read that goes on come to its end; the adapter."""
        (name,) = [view.info.name for view in self.store.adapter_views() if view.reading]
        assert self.news.wait(10)
        self.news.clear()
        self.store.settle()
        return name


@pytest.fixture
def make(tiny_facts: ModelFacts, adapter_folder: Folder) -> Make:
    def build(names: str, slots: int, host: int) -> Fetching:
        return Fetching(tiny_facts, {name: adapter_folder(name) for name in names}, slots, host)

    return build


def _reads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing can be read."""
    monkeypatch.setattr(fetches, "read_again", lambda *_: pytest.fail("it was read again"))


def test_those_who_wait_get_their_adapters_in_their_order_and_keep_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make("abcd", slots=1, host=2)
    bench.store.acquire(["d"], 9, "request 9")
    assert bench.store.lacking("abcd") == ["a", "b"]
    bench.events.clear()
    bench.want("b", "a", "c")
    assert bench.read() == "b" and bench.store.lacking("ab") == ["a"]
    bench.want("b", "a", "c")
    assert bench.read() == "a" and bench.tiers() == {"a": "host", "b": "host", "c": "disk", "d": "slot"}
    assert [(event.adapter, event.because) for event in bench.seen(HostLoaded)] == [
        ("b", "request 1, which waits"), ("a", "request 2, which waits")]
    assert {event.adapter for event in bench.seen(HostEvicted)} == {"c", "d"}
    bench.want("b", "a", "c")  # there is no room for a third
    _reads_end(monkeypatch)
    assert not any(view.reading for view in bench.store.adapter_views())
    bench.store.release(9)
    for user, name in enumerate("ba"):
        bench.store.acquire([name], user, "its turn")
        bench.store.release(user)
    assert [event.source for event in bench.seen(SlotLoaded)] == ["host", "host"]


def test_what_someone_waits_for_is_kept_longer_than_what_was_used_since(make: Make) -> None:
    bench = make("abcd", slots=2, host=2)
    bench.store.acquire(["d"], 9, "request 9")
    bench.want("a")
    bench.read()
    bench.store.adapter("d")
    assert bench.store.host_view().adapters == ("a", "d")
    bench.want("a", "b")
    assert bench.read() == "b" and bench.store.lacking("ab") == []
    bench.store.acquire(["c"], 8, "a check, which reads at once")
    assert bench.store.lacking("ab") == [] and bench.tiers()["c"] == "slot"


def test_an_earlier_one_takes_the_room_of_what_was_read_for_a_later_one(make: Make) -> None:
    bench = make("abc", slots=1, host=1)
    bench.store.acquire(["c"], 9, "request 9")
    bench.want("a")
    bench.read()
    bench.want("b", "a")
    assert bench.read() == "b" and bench.tiers()["a"] == "disk" and bench.tiers()["b"] == "host"


def test_a_load_by_command_has_its_room_all_the_same(make: Make, adapter_folder: Folder) -> None:
    bench = make("abc", slots=1, host=1)
    bench.store.acquire(["c"], 9, "request 9")
    bench.want("a")
    bench.read()
    bench.store.load(adapter_folder("e"), "e")
    assert bench.tiers()["e"] == "host" and bench.store.lacking("a") == ["a"]
    bench.want("a")
    assert bench.read() == "a" and bench.store.lacking("a") == []


def test_the_first_gets_a_mix_larger_than_the_host_tier(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make("abcde", slots=3, host=1)
    bench.store.acquire("e", 9, "request 9")
    bench.store.acquire(["d"], 8, "request 8")
    bench.store.acquire(["c"], 7, "request 7")
    read = []
    for _ in range(3):
        bench.want("dab", "c")
        if bench.store.lacking("dab"):
            read.append(bench.read())
    assert read == ["a", "b"] and bench.store.host_view().used_bytes <= BYTES
    _reads_end(monkeypatch)
    bench.store.release(9)
    bench.store.release(7)
    bench.store.acquire("dab", 1, "request 1")
    assert bench.store.routing("dab") is not None


def test_what_cannot_be_read_is_told_to_who_wants_it_and_tried_again_for_the_next(make: Make, adapter_folder: Folder) -> None:
    bench = make("abc", slots=1, host=1)
    away = bench.store.path("a").rename(bench.store.path("a").with_name("away"))
    before = bench.store.path("b").with_name("before")
    shutil.copytree(bench.store.path("b"), before)
    adapter_folder("b")  # other weights under the same path
    for name, words in (("a", "cannot be read again: .*no such file"), ("b", "has changed since it was loaded; reload it")):
        bench.want(name)
        bench.read()
        assert bench.store.lacking(name) == []
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
        bench.want(name)
        bench.read()
        bench.store.acquire(name, 1, "request 1")
        bench.store.release(1)


def test_free_slots_are_filled_beforehand_one_a_step_and_nobody_is_evicted(make: Make) -> None:
    bench = make("abcde", slots=3, host=5)
    bench.store.acquire(["e"], 9, "request 9")
    bench.store.release(9)
    for expected in ("a", "b", "b"):
        bench.want("a", "b", "cd", "c")
        assert bench.seen(SlotLoaded)[-1].adapter == expected
    assert [event.because for event in bench.seen(SlotLoaded)][1:] == ["request 1, which waits", "request 2, which waits"]
    assert not bench.seen(SlotEvicted) and bench.tiers() == {"a": "slot", "b": "slot", "c": "host", "d": "host", "e": "slot"}


def test_a_free_slot_is_left_to_the_first_whose_adapter_is_still_read(make: Make) -> None:
    bench = make("ab", slots=1, host=1)
    bench.want("a", "b")
    assert not bench.seen(SlotLoaded)
    bench.read()
    bench.want("a", "b")
    assert [event.adapter for event in bench.seen(SlotLoaded)] == ["a"]


@pytest.mark.parametrize("happens", ["nobody wants it", "it is unloaded", "it is reloaded", "a check read it"])
def test_what_is_not_wanted_any_more_is_dropped(happens: str, make: Make, adapter_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real, given_up = threading.Event(), fetches.read_again, threading.Event()

    def read(*arguments: object) -> object:
        if len(arguments) == 3:  # in the loop
            return real(*arguments)  # type: ignore[arg-type]
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
        case "a check read it":
            bench.store.acquire(["a"], 1, "the check of a")
    bench.events.clear()
    before = bench.tiers()
    gate.set()
    assert given_up.wait(10)
    bench.news.wait(2)
    bench.store.settle()
    bench.want()
    assert bench.tiers() == before and not bench.events
    assert bench.store.host_view().used_bytes == BYTES * len(bench.store.host_view().adapters)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_first_gets_its_slots_whatever_else_is_wanted(seed: int, make: Make) -> None:
    draw = random.Random(seed)
    bench = make("abcdef", slots=draw.randint(2, 4), host=draw.randint(1, 4))
    queue = ["".join(draw.sample("abcdef", draw.randint(1, 2))) for _ in range(12)]
    reads = 0
    while queue:
        bench.store.settle()
        bench.want(*queue)
        view = bench.store.host_view()
        assert view.used_bytes == BYTES * len(view.adapters) <= view.limit_bytes
        if bench.store.lacking(queue[0]):
            bench.read()
            reads += 1
            assert reads <= 40, "it reads in circles"
        else:
            bench.store.acquire(queue.pop(0), 1, "request 1")
            bench.store.release(1)
            if draw.random() < 0.3:
                draw.shuffle(queue)

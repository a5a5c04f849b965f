"""Names over three tiers: one copy, honest events, nothing lost by a failure."""
from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch
from store_bench import BYTES, StoreBench, Words

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.protocol import (
    AdapterChanged,
    AdapterLoaded,
    AdapterUnloaded,
    AdapterUnloading,
    HostEvicted,
    HostLoaded,
    SlotEvicted,
    SlotLoaded,
    SlotTouched,
)
from lora_bench.engine.slot_pool import MixTooLarge, SlotsBusy

Folder = Callable[..., Path]


@pytest.fixture
def bench(tiny_facts: ModelFacts) -> StoreBench:
    return StoreBench(tiny_facts)


# -- loading -------------------------------------------------------------------------------------
def test_loading_takes_the_folder_s_name_or_the_next_free_one(bench: StoreBench, adapter_folder: Folder) -> None:
    assert bench.store.load(adapter_folder("x/style")).name == "style"
    assert bench.store.load(adapter_folder("y/style")).name == "style-2"
    assert bench.store.load(adapter_folder("z/style")).name == "style-3"
    assert bench.store.load(adapter_folder("z/style"), "mine").name == "mine"
    assert list(bench.store.infos) == ["style", "style-2", "style-3", "mine"]
    assert bench.store.host_view().used_bytes == 4 * BYTES
    assert [type(event) for event in bench.events] == [HostLoaded, AdapterLoaded] * 4


def test_the_same_content_again_is_one_copy_and_is_said(bench: StoreBench, adapter_folder: Folder) -> None:
    folder = adapter_folder("style")
    bench.store.load(folder)
    again = bench.store.load(folder)
    assert again.name == "style" and any("already loaded as 'style'" in note for note in again.notes)
    bench.store.load(folder, "style")
    assert len(bench.store.infos) == 1 and bench.store.host_view().used_bytes == BYTES
    assert bench.store.infos["style"].notes == ()
    other = bench.store.load(folder, "twin")
    assert any("the same content as 'style'" in note for note in other.notes)


def test_a_name_is_not_taken_by_other_content(bench: StoreBench, adapter_folder: Folder) -> None:
    bench.store.load(adapter_folder("one"), "it")
    bench.events.clear()
    with pytest.raises(AdapterError, match="the name 'it' is taken by other content"):
        bench.store.load(adapter_folder("two"), "it")
    with pytest.raises(AdapterError, match="empty name"):
        bench.store.load(adapter_folder("two"), " ")
    assert bench.events == [] and len(bench.store.infos) == 1


def test_an_adapter_larger_than_the_host_tier_is_refused_with_the_numbers(tiny_facts: ModelFacts, adapter_folder: Folder) -> None:
    bench = StoreBench(tiny_facts, host_bytes=BYTES - 1)
    with pytest.raises(AdapterError, match=f"takes {BYTES:,} bytes, the host cache holds {BYTES - 1:,}"):
        bench.store.load(adapter_folder("style"))
    assert bench.events == [] and not bench.store.infos


def test_loads_at_once_make_one_copy(bench: StoreBench, adapter_folder: Folder) -> None:
    folder = adapter_folder("style")
    threads = [Thread(target=bench.store.load, args=(folder, "it")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bench.seen(AdapterLoaded)) == 8 and len(bench.seen(HostLoaded)) == 1
    assert bench.store.host_view().used_bytes == BYTES


def test_a_rank_far_over_the_matrix_costs_no_more_than_the_matrix(tiny_facts: ModelFacts, adapter_folder: Folder) -> None:
    bench = StoreBench(tiny_facts, host_bytes=1 << 30)
    rank = 40_000  # squared it would be 6 GiB in fp32
    ones = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight": torch.full(shape, 1e-3)
            for half, shape in (("A", (rank, 24)), ("B", (36, rank)))}
    info = bench.store.load(adapter_folder("wide", ("q_proj",), r=rank, tensors=ones, lora_alpha=rank))
    assert info.norms[0] == pytest.approx(rank * 1e-6 * (24 * 36) ** 0.5, rel=1e-4) and info.norms[1] == 0


# -- tiers ---------------------------------------------------------------------------------------
def test_moves_between_tiers_are_told_with_their_cause(tiny_facts: ModelFacts, adapter_folder: Folder) -> None:
    bench = StoreBench(tiny_facts, slots=1, host_bytes=2 * BYTES)
    for name in "abc":
        bench.store.load(adapter_folder(name))
    assert bench.seen(HostEvicted) == [HostEvicted("a", BYTES, f"c needed {BYTES:,} bytes of {2 * BYTES:,}")]
    assert bench.tiers() == {"a": "disk", "b": "host", "c": "host"}
    bench.events.clear()
    bench.store.acquire(["a"], 1, "request 1")
    (loaded,) = bench.seen(SlotLoaded)
    assert (loaded.adapter, loaded.source, loaded.because) == ("a", "disk", "request 1")
    assert [event.adapter for event in bench.seen(HostEvicted)] == ["b"]
    assert bench.store.host_view().adapters == ("c", "a")
    bench.store.release(1)
    bench.store.acquire(["c"], 2, "request 2")
    assert bench.seen(SlotEvicted) == [SlotEvicted(0, "a", "c needed a slot for request 2")]
    assert bench.seen(SlotLoaded)[-1].source == "host"
    assert bench.tiers() == {"a": "host", "b": "disk", "c": "slot"}


def test_a_file_that_changed_or_went_is_said_when_it_must_be_read_again(tiny_facts: ModelFacts, adapter_folder: Folder) -> None:
    bench = StoreBench(tiny_facts, slots=1, host_bytes=BYTES)
    bench.store.load(adapter_folder("one"))
    bench.store.acquire(["one"], 1, "request 1")
    adapter_folder("one")  # other random weights in the same place
    bench.store.load(adapter_folder("two"))
    assert bench.store.routing(["one"]) is not None  # the loaded version keeps answering
    bench.store.release(1)
    bench.store.acquire(["two"], 2, "request 2")
    bench.store.release(2)
    bench.events.clear()
    with pytest.raises(AdapterError, match="'one' is no longer in memory and .* has changed since it was loaded"):
        bench.store.acquire(["one"], 3, "request 3")
    shutil.rmtree(bench.store.infos["one"].path)
    with pytest.raises(AdapterError, match="'one' is no longer in memory and cannot be read again: .*no such file"):
        bench.store.acquire(["one"], 3, "request 3")
    assert bench.events == [] and bench.tiers() == {"one": "disk", "two": "slot"}
    bench.store.acquire(["two"], 4, "request 4")
    assert bench.seen(SlotTouched) == [SlotTouched(0, "two")]


def test_a_refused_mix_changes_nothing(bench: StoreBench, adapter_folder: Folder) -> None:
    for name in "abc":
        bench.store.load(adapter_folder(name))
    bench.store.acquire(["a"], 1, "request 1")
    bench.store.acquire(["b"], 2, "request 2")
    bench.events.clear()
    before = bench.store.slot_views()
    for names, error in ((["a", "b", "c"], MixTooLarge), (["c"], SlotsBusy), (["a", "zz"], AdapterError)):
        with pytest.raises(error):
            bench.store.acquire(names, 3, "request 3")
    after = bench.store.slot_views()
    assert bench.events == [] and [(v.adapter, v.users) for v in before] == [(v.adapter, v.users) for v in after]


def test_a_pinned_adapter_keeps_its_slot(bench: StoreBench, adapter_folder: Folder) -> None:
    for name in "abc":
        bench.store.load(adapter_folder(name))
    bench.store.acquire(["a", "b"], None, "the mix")
    bench.store.pin("a", True)
    bench.store.acquire(["c"], None, "the mix")
    assert bench.tiers() == {"a": "slot", "b": "host", "c": "slot"}
    assert [view.pinned for view in bench.store.adapter_views()] == [True, False, False]
    bench.store.pin("a", False)
    bench.store.acquire(["b"], None, "the mix")
    assert bench.tiers() == {"a": "host", "b": "slot", "c": "slot"}


# -- unloading -----------------------------------------------------------------------------------
def test_unloading_frees_and_waits_for_requests(bench: StoreBench, adapter_folder: Folder) -> None:
    folder = adapter_folder("a")
    bench.store.load(folder)
    bench.store.acquire(["a"], 7, "request 7")
    bench.store.acquire(["a"], 8, "request 8")
    bench.events.clear()
    bench.store.unload("a")
    assert bench.events == [AdapterUnloading("a", (7, 8))]
    for call in (lambda: bench.store.unload("a"), lambda: bench.store.load(folder), lambda: bench.store.acquire(["a"], 9, "request 9")):
        with pytest.raises(AdapterError, match="being unloaded"):
            call()
    bench.store.acquire(["a"], 8, "request 8")  # who has it may go on with it
    bench.store.release(7)
    assert "a" in bench.store.infos
    bench.store.release(8)
    assert bench.events[-1] == AdapterUnloaded("a", 2 * BYTES)
    assert not bench.store.infos and bench.store.host_view().used_bytes == 0 and bench.store.slot_views()[0].adapter == ""
    with pytest.raises(AdapterError, match="no adapter 'a' is loaded"):
        bench.store.unload("a")


def test_a_mix_changed_away_from_a_leaving_adapter_lets_it_go(bench: StoreBench, adapter_folder: Folder) -> None:
    bench.store.load(adapter_folder("a"))
    bench.store.acquire(["a"], 7, "request 7")
    bench.store.unload("a")
    bench.store.acquire([], 7, "request 7")
    assert bench.seen(AdapterUnloaded) == [AdapterUnloaded("a", 2 * BYTES)]


def test_new_content_under_an_old_name(bench: StoreBench, adapter_folder: Folder) -> None:
    old = bench.store.load(adapter_folder("a"))
    bench.store.acquire(["a"], None, "the mix")
    routing = bench.store.routing(["a"])
    bench.store.unload("a")
    new = bench.store.load(adapter_folder("a"))
    bench.store.acquire(["a"], None, "the mix")
    again = bench.store.routing(["a"])
    assert old.digest != new.digest and routing is not None and again is not None
    assert not torch.equal(routing.layers[0]["qkv_proj"].a, again.layers[0]["qkv_proj"].a)


# -- the rest ------------------------------------------------------------------------------------
def test_routing_is_ordered_by_digest_whatever_the_order_of_names(bench: StoreBench, adapter_folder: Folder) -> None:
    infos = [bench.store.load(adapter_folder(name)) for name in "ab"]
    with pytest.raises(LookupError, match="acquire them first"):
        bench.store.routing(["a"])
    bench.store.acquire("ab", None, "the mix")
    ordered = [info.name for info in sorted(infos, key=lambda info: info.digest)]
    routing = bench.store.routing("ba")
    assert routing is not None and list(routing.columns) == ordered and bench.store.routing("ab") is routing
    assert bench.store.routing(()) is None


def test_an_invocation_is_shown_set_and_taken_away(bench: StoreBench, adapter_folder: Folder) -> None:
    assert bench.store.load(adapter_folder("a", alora_invocation_tokens=[3, 4])).invocation == "t3 t4"
    assert bench.store.set_invocation("a", "t5 t6 t7").invocation_tokens == (5, 6, 7)
    bench.store.set_invocation("a", "t5 t6 t7")
    assert bench.store.set_invocation("a", "").invocation_tokens == ()
    assert [event.adapter.invocation for event in bench.seen(AdapterChanged)] == ["t5 t6 t7", ""]
    with pytest.raises(AdapterError, match="has no tokens"):
        bench.store.set_invocation("a", " ")
    with pytest.raises(AdapterError, match="did you mean 'a'"):
        bench.store.set_invocation("aa", "t1")


def test_the_same_invocation_text_keeps_the_ids_of_the_file(
    bench: StoreBench, adapter_folder: Folder, monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench.store.load(adapter_folder("a", alora_invocation_tokens=[3, 4]))
    monkeypatch.setattr(Words, "encode", lambda self, text, special: [9])  # the base would tokenise the text otherwise
    assert bench.store.set_invocation("a", "t3 t4").invocation_tokens == (3, 4)
    assert not bench.seen(AdapterChanged)


def test_clearing_tells_what_each_adapter_really_freed(tiny_facts: ModelFacts, adapter_folder: Folder) -> None:
    bench = StoreBench(tiny_facts, host_bytes=BYTES)
    for name in ("a", "b"):
        bench.store.load(adapter_folder(name))  # the second sends the first back to disk
    bench.store.clear()
    assert [(event.name, event.freed_bytes) for event in bench.seen(AdapterUnloaded)] == [("a", 0), ("b", BYTES)]
    assert not bench.store.adapter_views()

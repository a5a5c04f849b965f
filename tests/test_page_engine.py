"""An engine whose adapters lie in pages, beside one that holds them whole; and what of them is kept in RAM."""
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_bench import NAMES, PROMPT, Bench, random_ids
from store_bench import BYTES, StoreBench

from lora_bench.engine.base_file import open_base
from lora_bench.engine.config import PAGE_SHARE, SLOT_PAGES, make_config
from lora_bench.engine.fetches import Want
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.page_image import page_shapes
from lora_bench.engine.page_loads import PageLoad, PageLoads
from lora_bench.engine.protocol import AdapterUse, HostView, LoadModel, Mix, RequestQueued, SlotEvicted, SlotLoaded, StepFinished, TokenIds
from lora_bench.engine.slot_pool import MixTooLarge

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
Folder = Callable[..., Path]
MIXES: tuple[Mix, ...] = (
    (AdapterUse("one"),), (AdapterUse("three", -0.7), AdapterUse("one", 0.5)), (AdapterUse("two", 2.0),), (), (AdapterUse("one", 0.0),),
    (AdapterUse("one", 0.3), AdapterUse("two", 0.3), AdapterUse("three", 0.3)), (AdapterUse("deep"),),
    (AdapterUse("deep", 0.4), AdapterUse("two")),
)


@pytest.mark.calm
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_logits_are_those_of_adapters_held_whole(make: Callable[..., Bench], adapter_folder: Folder, device: str) -> None:
    deep = adapter_folder("deep", ("q_proj", "o_proj"), r=20)
    whole, paged = make(), make(pages=5, device=device, dtype="fp32")
    for bench in (whole, paged):
        bench.engine.load_adapter(str(deep), "deep")
    for mix in random.sample(MIXES, len(MIXES)):  # in three slots and five pages: adapters come and go
        ids = random_ids(30, random.randrange(1000))
        torch.testing.assert_close(paged.engine.logits(ids, mix).cpu(), whole.engine.logits(ids, mix), **CLOSE)
    prompts = [(random_ids(20 + number, number), mix) for number, mix in enumerate(MIXES[:6])]
    for ours, theirs in zip(paged.engine.batch_logits(prompts), whole.engine.batch_logits(prompts), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, **CLOSE)
    assert paged.engine.snapshot().composed_bytes == 0 < whole.engine.snapshot().composed_bytes
    assert whole.engine.snapshot().pages == ()


@pytest.mark.calm
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_replies_of_adapters_that_come_and_go_are_those_of_each_alone(make: Callable[..., Bench], device: str) -> None:
    whole, paged = make(), make(pages=2, device=device, dtype="fp32")
    asked = [(random_ids(random.randrange(2, 40), number), random.choice(MIXES[:5])) for number in range(14)]
    for number, (ids, mix) in enumerate(asked):
        paged.submit(number, TokenIds(ids), mix, max_tokens=random.randrange(1, 12))
        paged.run(random.randrange(3))
    paged.run()
    assert paged.of(SlotEvicted) or len({use.name for _, mix in asked for use in mix if use.scale}) < 3
    for number, (ids, mix) in enumerate(asked):
        got = paged.ids(number)
        assert whole.same(ids, mix, got, whole.reply(mix, prompt=TokenIds(ids), max_tokens=len(got)))


def test_the_snapshot_counts_pages_and_an_unload_frees_them(make: Callable[..., Bench]) -> None:
    bench = make(pages=4)
    bench.engine.logits(PROMPT.ids, tuple(map(AdapterUse, NAMES)))
    shot, shapes = bench.engine.snapshot(), page_shapes(bench.engine.model.base.facts)
    assert [slot.pages for slot in shot.slots] == [2, 2, 2], "one of qkv_proj and one of down_proj"
    assert {view.kind: (view.used, view.total, view.bytes) for view in shot.pages} == {
        kind: (3 if kind in ("qkv_proj", "down_proj") else 0, 4, 4 * shape.numbers) for kind, shape in shapes.items()}
    assert shot.slots[0].bytes == 4 * (shapes["qkv_proj"].numbers + shapes["down_proj"].numbers), "pages are taken whole"
    bench.engine.unload_adapter("two")
    assert [view.used for view in bench.engine.snapshot().pages] == [2, 0, 0, 2, 0]


def test_a_request_waits_for_pages_with_the_numbers_and_one_that_never_fits_is_refused(
    make: Callable[..., Bench], adapter_folder: Folder,
) -> None:
    bench = make(pages=3)
    for name, rank in (("wide", 33), ("wider", 60)):
        bench.engine.load_adapter(str(adapter_folder(name, ("q_proj", "v_proj", "down_proj"), r=rank)), name)
    bench.submit(1, mix=(AdapterUse("one"),))
    bench.submit(2, mix=(AdapterUse("wide"),))
    bench.run(2)
    assert [event.because for event in bench.of(RequestQueued)] == [
        "the mix needs 3 more pages of qkv_proj, 2 can be had now; the rest are held by request 1"]
    bench.run()
    assert bench.finished(2).reason == "length"
    assert [(event.adapter, event.because) for event in bench.of(SlotEvicted)] == [
        ("one", "wide needed 1 more page of qkv_proj for request 2")]
    with pytest.raises(MixTooLarge, match=r"needs 4 pages of qkv_proj, there are 3; take adapters out of it or start with --slots 4$"):
        bench.engine.set_mix((AdapterUse("wider"),))


def test_a_reload_that_needs_more_pages_than_are_free_waits_in_ram(make: Callable[..., Bench], adapter_folder: Folder) -> None:
    bench = make(pages=2)
    for name in ("one", "two"):
        bench.engine.logits(PROMPT.ids, (AdapterUse(name),))
    adapter_folder("one", ("q_proj",), r=17)
    bench.events.clear()
    bench.engine.reload_adapter("one")
    assert [event.because for event in bench.of(SlotEvicted)] == ["its file was read again"] and not bench.of(SlotLoaded)
    assert [view.tier for view in bench.engine.snapshot().adapters] == ["host", "slot", "host"]
    bench.engine.logits(PROMPT.ids, (AdapterUse("one"),))
    assert [event.because for event in bench.of(SlotEvicted)][1:] == ["one needed 1 more page of qkv_proj for a look at the logits"]
    adapter_folder("one", ("q_proj",), r=3)
    bench.engine.reload_adapter("one")
    assert bench.of(SlotLoaded)[-1].adapter == "one" and bench.engine.snapshot().pages[0].used == 1


@pytest.mark.calm
def test_requests_finish_on_the_pages_of_what_was_reloaded(make: Callable[..., Bench], adapter_folder: Folder) -> None:
    whole, bench = make(), make(pages=3)
    alone = whole.reply((AdapterUse("one"),))
    bench.submit(1, mix=(AdapterUse("one"),))
    bench.run(5)
    adapter_folder("one", ("q_proj", "v_proj"), r=30)
    bench.engine.reload_adapter("one")
    bench.submit(2, mix=(AdapterUse("one"),))
    bench.run()
    assert whole.same(PROMPT.ids, (AdapterUse("one"),), bench.ids(1), alone)
    assert bench.engine.snapshot().pages[0].used == 2, "what was reloaded left with its request"


def test_a_device_has_as_many_pages_as_slots_use_and_memory_lets_it(tiny_gguf: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    base = open_base(tiny_gguf())
    one = 2 * sum(shape.numbers for shape in page_shapes(base.facts).values())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    found = {}
    for free in (1 << 30, 300_000, 70_000):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1 << 31))
        config = make_config(LoadModel(str(base.path), "cuda", "bf16", slots=3), base, lambda: None)
        assert config.pages * one <= PAGE_SHARE * free
        found[config.pages] = [note for note in config.notes if "rank rows" in note]
    ample, some, none = found
    assert ample == 3 * SLOT_PAGES and not found[ample]
    assert 0 < some < ample and f"there are {some} pages of 16 rank rows for adapters instead of {ample}: no more fit" in found[some][0]
    assert none == 0 and f"held whole and steps that use them run without graphs: a page of rank rows takes {one:,} bytes" in found[none][0]
    assert make_config(LoadModel(str(base.path), "cpu"), base, lambda: None).pages == 0


# -- in RAM --------------------------------------------------------------------------------------
def _image(facts: ModelFacts) -> int:
    return 4 * page_shapes(facts)["qkv_proj"].numbers


def test_the_host_tier_counts_images_and_does_without_one_that_does_not_fit(tiny_facts: ModelFacts, adapter_folder: Folder) -> None:
    whole = BYTES + _image(tiny_facts)
    for room, used, count in ((2 * whole, 2 * whole, 2), (2 * whole - 1, whole, 1), (whole - 1, 2 * BYTES, 2)):
        bench = StoreBench(tiny_facts, 2, room, pages=4)
        for name in "ab":
            bench.store.load(adapter_folder(name), name)
        view = bench.store.host_view()
        assert (view.used_bytes, len(view.adapters)) == (used, count)
        bench.store.acquire("ab", 1, "request 1")
        assert bench.tiers() == {"a": "slot", "b": "slot"}


def test_free_slots_are_filled_beforehand_only_as_far_as_pages_are_free(tiny_facts: ModelFacts, adapter_folder: Folder) -> None:
    bench = StoreBench(tiny_facts, 4, 1 << 30, pages=3)
    for name, rank in (("a", 16), ("b", 17), ("c", 1)):
        bench.store.load(adapter_folder(name, r=rank), name)
    bench.store.acquire(["a"], None, "the mix")
    bench.store.load(adapter_folder("d", r=1), "d")
    for _ in range(4):
        bench.store.want([Want(["b"], "request 1, which waits"), Want(["d"], "request 2, which waits")])
    assert bench.tiers() == {"a": "slot", "b": "slot", "c": "host", "d": "host"} and not bench.seen(SlotEvicted)
    assert bench.store.page_views()[0].used == 3
    bench.store.acquire(["d"], 2, "request 2")
    assert [(event.adapter, event.because) for event in bench.seen(SlotEvicted)] == [
        ("a", "d needed 1 more page of qkv_proj for request 2")]


def test_nothing_is_in_pages_where_there_are_none(tiny_facts: ModelFacts, adapter_folder: Folder) -> None:
    bench = StoreBench(tiny_facts, 2)
    bench.store.load(adapter_folder("a"), "a")
    bench.store.acquire(["a"], 1, "request 1")
    assert bench.store.page_views() == () and bench.store.page_pools == {} and bench.store.slot_views()[0].pages == 0
    assert bench.store.host_view() == HostView(BYTES, 10 * BYTES, ("a",))


class _Copying:
    """A load that is over after it was asked for so many times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_those_that_run_go_on_until_the_pages_of_another_are_filled(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(pages=4)
    monkeypatch.setattr(PageLoads, "wait", lambda self, load: None)
    copy, slow = PageLoads.copy, [0]
    monkeypatch.setattr(PageLoads, "copy", lambda self, *parts: copy(self, *parts) and PageLoad(_Copying(slow[0])))
    bench.submit(1, mix=(AdapterUse("one"),))
    bench.run(3)
    slow[0] = 2
    bench.submit(2, mix=(AdapterUse("two"),))
    bench.run(2)
    assert [event.because for event in bench.of(RequestQueued)] == ["adapter two is on the way to a slot"]
    assert not bench.started(2) and bench.engine.snapshot().slots[1].adapter == "two"
    assert [step.decode_tokens for step in bench.of(StepFinished)][-2:] == [1, 1]
    bench.run(2)
    assert bench.started(2)
    slow[0] = 1000
    bench.run()
    bench.submit(3, mix=(AdapterUse("three"),))
    bench.run()
    assert bench.finished(3).ids and bench.finished(2).ids, "nobody is there to go on meanwhile"

"""Rank rows in pages: what they hold, what a step reads of them, and who has which."""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
import torch

from lora_bench.engine import page_image
from lora_bench.engine.adapters.adapter import Adapter, AdapterWeights, LoraPair
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.dora_rows import BaseSquares
from lora_bench.engine.mix import ActiveUse
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts, module_shapes, tensor_shapes
from lora_bench.engine.page_image import build_image, page_needs, page_shapes
from lora_bench.engine.page_lists import LIST_WORDS, MAX_COLUMNS
from lora_bench.engine.page_pool import PagePool
from lora_bench.engine.page_table import PageTable
from lora_bench.engine.protocol import AdapterInfo, Event, SlotEvicted, SlotLoaded
from lora_bench.engine.routing import Routing, RoutingCache
from lora_bench.engine.slot_content import build_content
from lora_bench.engine.slot_pool import Arrival, MixTooLarge, SlotPool, SlotsBusy
from lora_bench.engine.slots import Slot, SlotContent, fused_modules
from lora_bench.kernels.lora_tiles import lora_expand_tiles_
from lora_bench.kernels.rank_pages import MAX_PAGES, rank_delta

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


def _adapter(name: str, pairs: Mapping[str, LoraPair]) -> Adapter:
    info = AdapterInfo(name=name, path=f"/{name}", format="", digest=name, ranks=(), effective_scales=(), matched=0, total=0, targets={},
                       bytes=0, rslora=False, dtype="", base_model="")
    return Adapter(info, AdapterWeights(dict(sorted(pairs.items()))))


def _random_adapter(name: str, facts: ModelFacts, ranks: Sequence[int] = (1, 3, 16, 17, 40)) -> Adapter:
    """Of some modules, each of its own rank and scaling."""
    shapes = module_shapes(facts)
    chosen = random.sample(sorted(shapes), random.randrange(1, len(shapes) + 1))
    pairs = {}
    for module in chosen:
        (d_out, d_in), rank = shapes[module], random.choice(ranks)
        pairs[module] = LoraPair(torch.randn(rank, d_in), torch.randn(d_out, rank), random.choice([0.5, -2.0, 1 / 3]))
    return _adapter(name, pairs)


class _Paged:
    """Adapters of a tiny base in slots, with and without pages; the pages were others' before and are given in any order."""

    def __init__(self, facts: ModelFacts, adapters: Sequence[Adapter], device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        weights = {name: torch.randn(shape).to(device, dtype) for name, shape in tensor_shapes(facts).items()}
        self.facts, self.decoder = facts, Decoder(facts, weights, 16)
        needed = sum(max(page_needs(adapter.weights, page_shapes(facts)).values()) for adapter in adapters)
        self.pool = PagePool(facts, needed + 6, dtype, self.decoder.device)
        for pool in self.pool.pools.values():
            pool.a.fill_(float("nan"))
            pool.b.fill_(float("nan"))
        others = [self.pool.enter(self._image(_random_adapter("other", facts))) for _ in range(2)]
        shapes = module_shapes(facts)
        self._sizes = {place: [shapes[module][0] for module in modules] for place, modules in fused_modules(facts).items()}
        self.slots = self._fill(adapters[:1])
        self.pool.leave(others[0])
        self.slots += self._fill(adapters[1:])

    def routing(self, paged: bool = True) -> Routing:
        slots = []
        for slot in self.slots:
            whole, content = slot.content
            slots.append(Slot(len(slots)))
            slots[-1].fill(slot.adapter, content if paged else whole)
            self.pool.wait(content.pages)
        return RoutingCache(self.facts.layers, self._sizes, self.decoder.device, pool=self.pool if paged else None).get(slots)

    def _fill(self, adapters: Sequence[Adapter]) -> list[Slot]:
        slots = []
        for adapter in adapters:
            image, squares = self._image(adapter), BaseSquares()
            content = build_content(adapter, self.decoder, squares, image).with_pages(self.pool.enter(image))
            slots.append(Slot(0))
            slots[-1].fill(adapter.info.name, (build_content(adapter, self.decoder, squares), content))  # type: ignore[arg-type]
        return slots

    def _image(self, adapter: Adapter) -> object:
        return build_image(adapter, self.pool.shapes, self.pool.dtype, self.pool.pinned)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_a_step_reads_in_pages_what_the_adapters_are(
    tiny_facts: ModelFacts, seed: int, device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch,
) -> None:
    random.seed(seed)
    monkeypatch.setattr(page_image, "PART_BYTES", random.choice([1, 4000, 4 << 20]))
    adapters = [_random_adapter(f"a{index}", tiny_facts) for index in range(random.randrange(1, 5))]
    paged = _Paged(tiny_facts, adapters, device, dtype)
    routing, whole = paged.routing(), paged.routing(paged=False)
    assert routing.obstacle == "" and routing.copied_bytes == 0 and "outside pages" in whole.obstacle
    rows, shapes = 5, module_shapes(tiny_facts)
    lists = np.full((PageTable.linears(tiny_facts), LIST_WORDS), -1, np.int32)
    weights = np.full((rows, MAX_COLUMNS), np.nan, np.float32)
    table = PageTable(tiny_facts, lists, weights, np.zeros_like(weights))
    assert table.compose(routing)
    mixes = [tuple(ActiveUse(adapter.info.name, random.uniform(-2, 2), random.choice([0, 7]))
                   for adapter in random.sample(adapters, random.randrange(len(adapters) + 1))) for _ in range(rows)]
    for row, mix in enumerate(mixes):
        table.fill(row, mix, 3)
    device_lists, device_weights = torch.from_numpy(lists).to(device), torch.from_numpy(weights).to(device)
    ranks = table.rank_rows(paged.pool.pools, device_lists, device_weights)
    step = routing.step(torch.from_numpy(weights[:, :len(adapters)]))
    for (layer, kind), modules in fused_modules(tiny_facts).items():
        x = torch.randn(rows, shapes[modules[0]][1], device=device).to(dtype)
        expected = torch.zeros(rows, sum(shapes[module][0] for module in modules), dtype=torch.float64)
        for row, mix in enumerate(mixes):
            for use in mix:
                first, adapter = 0, next(adapter for adapter in adapters if adapter.info.name == use.name)
                for module in modules:
                    end = first + shapes[module][0]
                    if use.start <= 3 and (pair := adapter.modules.get(module)) is not None:
                        b = (pair.b * pair.scaling).to(dtype).double()
                        expected[row, first:end] += use.scale * (x[row].cpu().double() @ pair.a.to(dtype).double().T @ b.T)
                    first = end
        scale = expected.norm().clamp(min=1)
        assert (rank_delta(x, ranks[layer][kind]).cpu() - expected).norm() <= max(tolerance / 10, 1e-5) * scale, (layer, kind)
        linear = routing.layers[layer].get(kind)
        assert (linear is not None) == (kind in whole.layers[layer])
        if linear is not None:
            y = torch.zeros(rows, expected.shape[1], device=device, dtype=dtype)
            lora_expand_tiles_(y, linear.shrink(x, step))
            assert (y.cpu() - expected).norm() <= tolerance * scale, (layer, kind)


def test_a_layer_lists_no_page_that_holds_nothing_of_it(tiny_facts: ModelFacts, seed: int) -> None:
    shapes = module_shapes(tiny_facts)

    def pair(module: str, rank: int) -> LoraPair:
        return LoraPair(torch.randn(rank, shapes[module][1]), torch.randn(shapes[module][0], rank), 1.0)

    deep = {"layers.0.self_attn.q_proj": 33, "layers.1.self_attn.v_proj": 4, "layers.1.mlp.down_proj": 16}
    adapters = [_adapter("deep", {module: pair(module, rank) for module, rank in deep.items()}),
                _adapter("late", {"layers.1.self_attn.k_proj": pair("layers.1.self_attn.k_proj", 2)})]
    routing = _Paged(tiny_facts, adapters).routing()
    assert page_needs(adapters[0].weights, PagePool(tiny_facts, 1, torch.float32, torch.device("cpu")).shapes) == {
        "qkv_proj": 3, "down_proj": 1}
    assert routing.lists["qkv_proj"].counts.tolist() == [3, 2] and routing.lists["down_proj"].counts.tolist() == [0, 1]
    assert routing.lists["qkv_proj"].at(1)[1] == (0, 1) and set(routing.lists) == {"qkv_proj", "down_proj"}
    assert set(routing.layers[0]) == {"qkv_proj"} and not routing.changes_head


def test_other_adapters_are_composed_anew_and_other_scales_are_not(tiny_facts: ModelFacts, seed: int) -> None:
    adapters = [_random_adapter(name, tiny_facts) for name in "ab"]
    paged = _Paged(tiny_facts, adapters)
    first, second = paged.routing(), paged.routing()
    lists, weights = np.zeros((PageTable.linears(tiny_facts), LIST_WORDS), np.int32), np.zeros((3, MAX_COLUMNS), np.float32)
    table = PageTable(tiny_facts, lists, weights, np.zeros_like(weights))
    assert table.compose(first) and not table.compose(first)
    written = lists.copy()
    table.fill(0, (ActiveUse("a", 2.0, 0),), 9)
    table.fill(1, (ActiveUse("b", -1.0, 10), ActiveUse("a", 0.5, 9)), 9)
    later = (ActiveUse("b", -1.0, 10),)
    table.fill(2, later, 9)
    assert weights[:, :2].tolist() == [[2, 0], [0.5, 0], [0, 0]] and not weights[:, 2:].any()
    table.fill(0, (ActiveUse("a", 3.0, 0),), 10)
    table.fill(1, (), 10)
    table.fill(2, later, 10)
    assert weights[:, :2].tolist() == [[3, 0], [0, 0], [0, -1]] and np.array_equal(lists, written)
    assert table.compose(second) and not weights.any()


def test_more_than_a_graph_reads_is_said(tiny_facts: ModelFacts, seed: int) -> None:
    def adapter(name: str, rank: int) -> Adapter:
        d_out, d_in = module_shapes(tiny_facts)["layers.0.mlp.down_proj"]
        return _adapter(name, {"layers.0.mlp.down_proj": LoraPair(torch.randn(rank, d_in), torch.randn(d_out, rank), 1.0)})

    for most, adapters in (("65 pages of down_proj act, at most 64 do in a graph", [adapter("a", 16 * MAX_PAGES + 1)]),
                           ("65 adapters act, at most 64 do in a graph", [adapter(f"a{index}", 1) for index in range(65)]),
                           ("", [adapter(f"a{index}", 16) for index in range(62)] + [adapter("b", 17)])):
        assert _Paged(tiny_facts, adapters).routing().obstacle == most


def test_numbers_too_large_for_the_dtype_are_refused_by_module(tiny_facts: ModelFacts, seed: int) -> None:
    adapter = _random_adapter("a", tiny_facts)
    module = random.choice(sorted(adapter.modules))
    loud = replace(adapter.modules[module], scaling=1e7)
    pool = PagePool(tiny_facts, 1, torch.float16, torch.device("cpu"))
    build_image(adapter, pool.shapes, pool.dtype, pinned=False)
    with pytest.raises(AdapterError, match=f"^/a: the weights of {module} times their effective scale are too large for float16"):
        build_image(_adapter("a", {**adapter.modules, module: loud}), pool.shapes, pool.dtype, pinned=False)


# -- who has which -------------------------------------------------------------------------------
class _Slots:
    """Slots of a tiny base with `pages` pages; adapters "qN" take N pages of qkv_proj, "dN" N of down_proj, a letter behind tells apart."""

    def __init__(self, facts: ModelFacts, count: int, pages: int) -> None:
        self.events: list[Event] = []
        self.facts, self.pages = facts, PagePool(facts, pages, torch.float32, torch.device("cpu"))
        self.pool = SlotPool(count, self.events.append, self.pages)

    def adapter(self, name: str) -> Adapter:
        module = {"q": "layers.1.self_attn.q_proj", "d": "layers.0.mlp.down_proj"}[name[0]]
        (d_out, d_in), rank = module_shapes(self.facts)[module], int(name[1:-1]) * 16 - random.randrange(16)
        return _adapter(name, {module: LoraPair(torch.randn(rank, d_in), torch.randn(d_out, rank), 1.0)})

    def take(self, names: str, user: int | None) -> list[Event]:
        self.events.clear()
        adapters = {name: self.adapter(name) for name in names.split()}
        holds = {user: list(adapters)} if user is not None else {}
        needs = {name: page_needs(adapter.weights, self.pages.shapes) for name, adapter in adapters.items()}
        missing, victims = self.pool.plan(list(adapters), holds, needs)
        images = {name: build_image(adapters[name], self.pages.shapes, torch.float32, pinned=False) for name in missing}
        arrivals = [Arrival(name, SlotContent({}, 10, 4), image, "host", 1.0) for name, image in images.items()]
        self.pool.settle(list(adapters), arrivals, victims, holds, f"request {user}")
        return list(self.events)

    @property
    def evicted(self) -> list[tuple[str, str]]:
        return [(event.adapter, event.because) for event in self.events if isinstance(event, SlotEvicted)]


def test_enough_of_the_least_recently_used_leave_for_the_pages(tiny_facts: ModelFacts, seed: int) -> None:
    slots = _Slots(tiny_facts, 5, 4)
    for name in ("q1a", "d4a", "q2a", "q1b"):
        slots.take(name, None)
    assert slots.pages.free == {"qkv_proj": 0, "o_proj": 4, "gate_up_proj": 4, "down_proj": 0, "lm_head": 4}
    loaded = slots.take("q2b", 1)
    assert slots.evicted == [("q1a", "q2b needed 2 more pages of qkv_proj for request 1"),
                             ("q2a", "q2b needed 1 more page of qkv_proj for request 1")], "one that has none of them stays"
    assert isinstance(loaded[-1], SlotLoaded) and loaded[-1].bytes == 10 + slots.pages.image_bytes({"qkv_proj": 2})
    views = {view.adapter: view for view in slots.pool.views() if view.adapter}
    assert (views["q2b"].pages, views["d4a"].pages, slots.pages.free["qkv_proj"]) == (2, 4, 1)
    assert [(view.kind, view.used, view.total) for view in slots.pages.views()] == [
        ("qkv_proj", 3, 4), ("o_proj", 0, 4), ("gate_up_proj", 0, 4), ("down_proj", 4, 4), ("lm_head", 0, 4)]


def test_a_slot_and_pages_may_both_be_lacking(tiny_facts: ModelFacts, seed: int) -> None:
    slots = _Slots(tiny_facts, 2, 4)
    slots.take("d1a q3a", None)
    slots.take("q2a", 1)
    assert slots.evicted == [("d1a", "q2a needed a slot for request 1"), ("q3a", "q2a needed 1 more page of qkv_proj for request 1")]
    assert slots.pages.free == dict.fromkeys(KINDS, 4) | {"qkv_proj": 2}


def test_pages_that_cannot_be_had_are_counted(tiny_facts: ModelFacts, seed: int) -> None:
    slots = _Slots(tiny_facts, 4, 4)
    slots.take("q2a", 1)
    slots.take("q1a", None)
    slots.pool.pinned.add("q1a")
    for names, kind, text in (
        ("q5a", MixTooLarge, r"needs 5 pages of qkv_proj, there are 4; take adapters out of it or start with --slots 5$"),
        ("q2b q2c", MixTooLarge, r"needs 4 pages of qkv_proj, 1 of 4 are pinned to adapters outside it \(q1a\)"),
        ("q3a", SlotsBusy, r"needs 3 more pages of qkv_proj, 1 can be had now; the rest are held by request 1 or pinned \(q1a\)"),
    ):
        with pytest.raises(kind, match=text):
            slots.take(names, 2)
        assert slots.events == [] and slots.pages.free["qkv_proj"] == 1
    slots.pool.release(1)
    slots.take("q3a", 2)
    assert [name for name, _ in slots.evicted] == ["q2a"] and slots.pages.free["qkv_proj"] == 0
    assert slots.pool.remove("q3a") == 10 + slots.pages.image_bytes({"qkv_proj": 3}) and slots.pages.free["qkv_proj"] == 3


def test_hundreds_of_moves_leave_every_page_with_one_owner(tiny_facts: ModelFacts, seed: int) -> None:
    random.seed(seed)
    slots = _Slots(tiny_facts, 4, 6)
    names = [f"{kind}{count}{letter}" for kind in "qd" for count in (1, 2, 3) for letter in "ab"]
    for move in range(300):
        user = random.choice([None, 1, 2])
        try:
            slots.take(" ".join(random.sample(names, random.randrange(1, 4))), user)
        except (MixTooLarge, SlotsBusy):
            assert slots.events == []
        if not move % 3:
            slots.pool.release(random.choice([1, 2]))
        contents = [slot.content for slot in slots.pool.slots if slot.content is not None]
        taken = [(kind, page) for content in contents for kind, pages in content.pages.pages.items() for page in pages]
        assert len(set(taken)) == len(taken) == sum(6 - free for free in slots.pages.free.values())
        for slot in slots.pool.slots:
            if slot.content:
                (kind, pages), = slot.content.pages.pages.items()
                assert len(pages) == int(slot.adapter[1]) and kind == {"q": "qkv_proj", "d": "down_proj"}[slot.adapter[0]]


@pytest.mark.gpu
def test_pages_change_hands_between_two_steps_and_nothing_waits_on_the_host(
    tiny_facts: ModelFacts, seed: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step reads what its adapters were when it was launched, though the next ones are brought in meanwhile."""
    random.seed(seed)
    monkeypatch.setattr(page_image, "PART_BYTES", 4000)
    pool = PagePool(tiny_facts, 6, torch.bfloat16, torch.device("cuda"))
    images = [build_image(_random_adapter(f"a{index}", tiny_facts), pool.shapes, pool.dtype, pool.pinned) for index in range(12)]
    held, seen, started = pool.enter(images[0]), [], perf_counter()
    for later in (*images[1:], None):
        pool.wait(held)
        torch.cuda._sleep(20_000_000)  # a step that takes its time before it reads
        seen.append({kind: tuple(torch.stack([pages[page] for page in held.pages[kind]])
                                 for pages in (pool.pools[kind].a, pool.pools[kind].b)) for kind in held.pages})
        pool.leave(held)
        if later is not None:
            held = pool.enter(later)
    launched = perf_counter() - started
    torch.cuda.synchronize()
    assert launched < (perf_counter() - started) / 2, "launching waits for nothing"
    for image, step in zip(images, seen, strict=True):
        assert step.keys() == image.counts.keys()
        for part in image.parts:
            page = step[part.kind][part.factor == "b"][part.page]
            assert torch.equal(page[part.first:part.first + len(part.numbers)].cpu(), part.numbers)

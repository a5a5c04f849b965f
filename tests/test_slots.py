"""Slot contents, compositions of several adapters, and the pool that gives slots away."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lora_bench.engine.adapters.adapter import Adapter
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.dora_rows import BaseSquares
from lora_bench.engine.eviction import Lru
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts, module_shapes, tensor_shapes
from lora_bench.engine.protocol import Event, SlotEvicted, SlotLoaded, SlotTouched
from lora_bench.engine.routing import RoutingCache
from lora_bench.engine.slot_content import build_content
from lora_bench.engine.slot_pool import Arrival, MixTooLarge, SlotPool, SlotsBusy
from lora_bench.engine.slots import Slot, SlotContent, fused_modules
from lora_bench.kernels.lora import lora_expand_, lora_shrink

CPU = torch.device("cpu")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
Folder = Callable[..., Path]


def _adapters(folder: Folder, facts: ModelFacts) -> list[Adapter]:
    """Ranks and targets all different, one with a single module, one with patterns."""
    folders = [
        folder("all", ALL, r=5, lora_alpha=3), folder("few", ("v_proj", "up_proj"), r=2, use_rslora=True),
        folder("one", ("k_proj",), r=7, lora_alpha=-2), folder("head", ("lm_head", "down_proj", "gate_proj"), r=1),
    ]
    return [load_adapter(open_adapter(path), facts, path.name) for path in folders]


def _sizes(facts: ModelFacts) -> dict[tuple[int, str], list[int]]:
    shapes = module_shapes(facts)
    return {key: [shapes[module][0] for module in modules] for key, modules in fused_modules(facts).items()}


def _decoder(facts: ModelFacts, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(facts, {name: torch.randn(shape).to(dtype) for name, shape in tensor_shapes(facts).items()}, 16)


def _content(adapter: Adapter, facts: ModelFacts, dtype: torch.dtype = torch.float32) -> SlotContent:
    return build_content(adapter, _decoder(facts, dtype), BaseSquares())


def _filled(adapters: list[Adapter], facts: ModelFacts) -> list[Slot]:
    slots = [Slot(index) for index in range(len(adapters))]
    for slot, adapter in zip(slots, adapters, strict=True):
        slot.fill(adapter.info.name, _content(adapter, facts))
    return slots


@pytest.mark.parametrize("chosen", [[0], [2], [3], [0, 1], [1, 2, 3], [0, 1, 2, 3], [3, 0]])
def test_every_fused_linear_gets_the_sum_of_the_deltas(adapter_folder: Folder, tiny_facts: ModelFacts, chosen: list[int]) -> None:
    adapters = [_adapters(adapter_folder, tiny_facts)[index] for index in chosen]
    routing = RoutingCache(tiny_facts.layers, _sizes(tiny_facts), CPU).get(_filled(adapters, tiny_facts))
    weights = torch.randn(6, len(adapters))
    weights[2] = 0
    step = routing.step(weights)
    shapes = module_shapes(tiny_facts)
    for (layer, fused), modules in fused_modules(tiny_facts).items():
        linear = routing.layers[layer].get(fused)
        x = torch.randn(6, shapes[modules[0]][1])
        expected = torch.cat([sum(
            (weights[:, column:column + 1] * pair.scaling * (x @ pair.a.T @ pair.b.T)
             for column, adapter in enumerate(adapters) if (pair := adapter.modules.get(module)) is not None),
            torch.zeros(6, shapes[module][0])) for module in modules], dim=1)
        if linear is None:
            assert not expected.any()
            continue
        y = torch.zeros_like(expected)
        lora_expand_(y, lora_shrink(x, linear.a, step.row_weights(linear)), linear.slices)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(y[2], torch.zeros_like(y[2]))


def test_scaling_is_folded_before_rounding(adapter_folder: Folder, tiny_facts: ModelFacts) -> None:
    adapter = load_adapter(open_adapter(adapter_folder("a", ("o_proj",), lora_alpha=0.3)), tiny_facts, "a")
    content = _content(adapter, tiny_facts, torch.bfloat16)
    pair, part = adapter.modules["layers.0.self_attn.o_proj"], content.parts[0, "o_proj"]
    assert part.b[0] is not None
    assert torch.equal(part.b[0], (pair.b * pair.scaling).T.bfloat16())
    assert content.nbytes == sum(pair.a.numel() + pair.b.numel() for pair in adapter.modules.values()) * 2
    assert content.rank == 4


def test_weights_too_large_for_the_dtype_are_refused(adapter_folder: Folder, tiny_facts: ModelFacts) -> None:
    adapter = load_adapter(open_adapter(adapter_folder("a", lora_alpha=1e7)), tiny_facts, "a")
    _content(adapter, tiny_facts, torch.bfloat16)
    with pytest.raises(AdapterError, match=": .*too large for float16"):
        _content(adapter, tiny_facts, torch.float16)


def test_one_adapter_is_used_as_it_lies(adapter_folder: Folder, tiny_facts: ModelFacts) -> None:
    slots = _filled(_adapters(adapter_folder, tiny_facts)[:1], tiny_facts)
    routing = RoutingCache(tiny_facts.layers, _sizes(tiny_facts), CPU).get(slots)
    assert slots[0].content is not None
    assert routing.layers[1]["qkv_proj"].a.data_ptr() == slots[0].content.parts[1, "qkv_proj"].a.data_ptr()


def test_the_copies_that_compositions_hold_are_counted(adapter_folder: Folder, tiny_facts: ModelFacts) -> None:
    slots = _filled(_adapters(adapter_folder, tiny_facts), tiny_facts)
    cache = RoutingCache(tiny_facts.layers, _sizes(tiny_facts), CPU)
    cache.get(slots[:1])
    assert cache.copied_bytes == 0, "one adapter is used as it lies"
    cache.get([slots[0], slots[2]])
    shared = module_shapes(tiny_facts)["layers.0.self_attn.k_proj"]
    a, b = (5 * 3 + 7) * shared[1], (5 + 7) * shared[0]  # q, k and v of "all" share one A; B is copied where both act
    assert cache.copied_bytes == tiny_facts.layers * 4 * (a + b)
    cache.forget(2)
    assert cache.copied_bytes == 0


def test_compositions_are_kept_until_a_slot_changes(adapter_folder: Folder, tiny_facts: ModelFacts) -> None:
    adapters = _adapters(adapter_folder, tiny_facts)
    slots = _filled(adapters, tiny_facts)
    cache = RoutingCache(tiny_facts.layers, _sizes(tiny_facts), CPU)
    first = cache.get(slots[:2])
    assert cache.get(slots[:2]) is first
    slots[1].fill("few", _content(adapters[1], tiny_facts, torch.float32))
    second = cache.get(slots[:2])
    assert second is not first
    cache.get(slots[2:3])
    assert cache.get(slots[:2]) is second
    cache.forget(0)
    assert cache.get(slots[:2]) is not second


def test_lru_order() -> None:
    lru = Lru()
    for key in "abcab":
        lru.touch(key)
    assert list(lru) == ["c", "a", "b"]
    lru.remove("c")
    lru.remove("unknown")
    assert list(lru) == ["a", "b"]


# -- the pool ------------------------------------------------------------------------------------
class _Pool:
    """A pool with contents of no weight, and what it emitted."""

    def __init__(self, count: int) -> None:
        self.events: list[Event] = []
        self.pool = SlotPool(count, self.events.append)

    def take(self, names: str, user: int | None) -> list[Event]:
        self.events.clear()
        holds = {user: list(names)} if user is not None else {}
        missing, victims = self.pool.plan(list(names), holds, {})
        arrivals = [Arrival(name, SlotContent({}, 10, 4), None, "host", 1.0) for name in missing]
        self.pool.settle(list(names), arrivals, victims, holds, f"request {user}")
        return list(self.events)

    @property
    def names(self) -> list[str]:
        return [slot.adapter for slot in self.pool.slots]


def test_the_least_recently_used_leaves_and_the_cause_is_said() -> None:
    pool = _Pool(2)
    assert pool.take("ab", 1) == [SlotLoaded(0, "a", 10, 1.0, "host", "request 1"), SlotLoaded(1, "b", 10, 1.0, "host", "request 1")]
    pool.pool.release(1)
    assert pool.take("a", 2) == [SlotTouched(0, "a")]
    pool.pool.release(2)
    assert pool.take("c", 3) == [SlotEvicted(1, "b", "c needed a slot for request 3"), SlotLoaded(1, "c", 10, 1.0, "host", "request 3")]


def test_the_same_request_touches_nothing_twice() -> None:
    pool = _Pool(2)
    pool.take("ab", 1)
    assert pool.take("ab", 1) == []
    assert pool.take("a", None) == [SlotTouched(0, "a")]


def test_a_changed_mix_may_evict_what_its_own_request_held() -> None:
    pool = _Pool(2)
    pool.take("ab", 1)
    pool.take("bc", 1)
    assert pool.names == ["c", "b"]
    assert pool.pool.users("a") == () and pool.pool.users("c") == (1,)


def test_what_others_hold_or_pin_stays() -> None:
    pool = _Pool(3)
    pool.take("a", 1)
    pool.take("b", None)
    pool.pool.pinned.add("b")
    with pytest.raises(SlotsBusy, match=r"2 more of 3 slots, 1 can be had now; the rest are held by request 1 or pinned \(b\)"):
        pool.take("cd", 2)
    with pytest.raises(MixTooLarge, match=r"needs 3 slots, 1 of 3 are pinned to adapters outside it \(b\)"):
        pool.take("cde", 2)
    with pytest.raises(MixTooLarge, match="needs 4 slots, there are 3"):
        pool.take("abcd", 1)
    assert pool.names == ["a", "b", ""] and pool.events == []
    pool.take("c", 2)
    assert pool.names == ["a", "b", "c"]
    pool.pool.release(1)
    pool.take("dc", 2)
    assert pool.names == ["d", "b", "c"]


def test_a_check_that_holds_a_slot_is_named_as_one() -> None:
    pool = _Pool(2)
    pool.take("a", -1_000_000)
    with pytest.raises(SlotsBusy, match=r"the rest are held by an adapter check$"):
        pool.take("bc", 2)
    pool.take("b", 1)
    with pytest.raises(SlotsBusy, match=r"the rest are held by request 1 and an adapter check$"):
        pool.take("cd", 2)


def test_views_tell_users_pins_and_idle_time() -> None:
    pool = _Pool(3)
    pool.take("a", 1)
    pool.take("ab", 2)
    pool.pool.release(1)
    pool.pool.pinned.add("b")
    first, second, third = pool.pool.views()
    assert (first.adapter, first.users, first.idle_s, first.bytes, first.rank) == ("a", 1, 0.0, 10, 4)
    assert second.pinned and not first.pinned
    assert (third.adapter, third.slot) == ("", 2)
    pool.pool.release(2)
    assert pool.pool.views()[0].idle_s >= 0 and pool.pool.views()[0].users == 0
    assert pool.pool.remove("a") == 10 and pool.pool.remove("a") == 0

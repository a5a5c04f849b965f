"""The engine over its KV memory: what is found again and what never is, groups, preemption."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from engine_bench import NAMES, ONE, THREE, TWO, Bench, random_ids

from lora_bench.engine.protocol import (
    AdapterUse,
    CacheCleared,
    Generate,
    GenerateTogether,
    Mix,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Sampling,
    StepFinished,
    TextDelta,
    TokenIds,
)

Write = Callable[..., Path]
Make = Callable[..., Bench]
HOT = {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.1}


# -- what is found ------------------------------------------------------------------------------------
def test_a_prompt_is_found_again_under_the_same_mix_and_not_under_another(make: Make) -> None:
    bench, prompt = make(), TokenIds(random_ids(50))
    for number, mix in enumerate([ONE, ONE, (AdapterUse("one", 0.6),), (), (AdapterUse("two", 0.0),), ONE, TWO]):
        bench.submit(number, prompt, mix, max_tokens=4)
        bench.run()
    used = [bench.started(number)[-1].cache for number in range(7)]
    assert [use.hit_tokens for use in used] == [0, 49, 0, 0, 49, 49, 0]
    kinds = [[(run.kind, run.blocks) for run in use.missed] for use in used]
    assert kinds == [[("new tokens", 4)], [], [("mix differs", 4)], [("mix differs", 4)], [], [], [("mix differs", 4)]]
    assert "0.5" in used[2].missed[0].detail and "0.6" in used[2].missed[0].detail
    assert bench.ids(0) == bench.ids(1) == bench.ids(5) and bench.ids(3) == bench.ids(4)
    counters = bench.engine.snapshot().kv.counters
    assert counters.hit_tokens == 49 * 3 and counters.looked_up_tokens == 49 * 7


def test_the_next_turn_finds_prompt_and_reply(make: Make) -> None:
    bench, prompt = make(), random_ids(40)
    bench.submit(1, TokenIds(prompt), ONE, max_tokens=12)
    bench.run()
    turn = (*prompt, *bench.ids(1), *random_ids(10, 1))
    bench.submit(2, TokenIds(turn), ONE, max_tokens=4)
    bench.run()
    assert bench.started(2)[-1].cache.hit_tokens == 51, "all but the token that was drawn last"
    fresh = make()
    fresh.submit(2, TokenIds(turn), ONE, max_tokens=4)
    fresh.run()
    assert fresh.same(turn, ONE, bench.ids(2), fresh.ids(2))


def test_what_comes_before_an_invocation_is_the_base(make: Make) -> None:
    bench, prompt = make(), (*random_ids(40), 7, 8, 9)
    bench.engine.set_invocation("one", "cde")
    bench.submit(1, TokenIds(prompt[:-3]), (), max_tokens=2)
    bench.run()
    bench.submit(2, TokenIds(prompt), ONE, max_tokens=2)
    bench.run()
    (started,) = bench.started(2)
    assert started.activations[0].found and started.activations[0].start == started.cache.hit_tokens == started.cache.base_tokens == 40


def test_reloaded_unloaded_and_cleared_content_is_never_found(make: Make, adapter_folder: Write) -> None:
    bench, prompt = make(), TokenIds(random_ids(50))
    alone = bench.reply(ONE)
    for number in (1, 2):
        bench.submit(number, prompt, ONE, max_tokens=4)
        bench.run()
        path = bench.engine.model.store.infos["one"].path
        bench.engine.unload_adapter("one")
        adapter_folder("one", ("q_proj", "v_proj", "down_proj"), r=2)
        bench.engine.load_adapter(path, "one")
    assert [event.because for event in bench.of(CacheCleared)] == ["adapter 'one' was unloaded"] * 2
    assert bench.started(2)[-1].cache.hit_tokens == 0 and bench.ids(1) != bench.ids(2) and alone
    bench.submit(3, prompt, (), max_tokens=4)
    bench.run()
    bench.engine.clear_cache()
    assert bench.engine.snapshot().kv.cached == 0
    bench.submit(4, prompt, (), max_tokens=4)
    bench.run()
    again = bench.started(4)[-1].cache
    assert again.hit_tokens == 0 and again.missed[0].kind == "cleared" and bench.ids(3) == bench.ids(4)


def test_numbers_that_are_not_finite_are_forgotten(make: Make, adapter_folder: Write) -> None:
    bench, prompt = make(), TokenIds(random_ids(40))
    path = "base_model.model.model.layers.0.mlp.down_proj"
    huge = {f"{path}.lora_A.weight": torch.full((2, 40), 1e18), f"{path}.lora_B.weight": torch.full((24, 2), 1e17)}
    bench.engine.load_adapter(str(adapter_folder("huge", ("down_proj",), r=2, tensors=huge)), "huge")
    bench.submit(1, prompt, (AdapterUse("huge", 1e6),))
    bench.run()
    assert bench.of(RequestFailed) and bench.engine.snapshot().kv.cached == 0


@pytest.mark.calm
def test_looks_find_what_is_there_and_say_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, fresh, ids = make(), make(), random_ids(70)
    computed, logits = [], bench.engine.model.runner.logits
    monkeypatch.setattr(bench.engine.model.runner, "logits", lambda works: computed.append(works[0].tokens) or logits(works))
    for mix in ((), ONE, (*ONE, *TWO)):
        first = fresh.engine.logits(ids, mix)
        fresh.engine.clear_cache()
        for count in (33, 70, 70):
            found = bench.engine.logits(ids[:count], mix)
        torch.testing.assert_close(found, first, rtol=1e-4, atol=1e-4)
    assert computed == [33, 37, 1] * 3


# -- together -----------------------------------------------------------------------------------------
def _together(bench: Bench, mixes: Sequence[Mix], prompt: Sequence[int], **sampling: object) -> None:
    settings = Sampling(**{"max_tokens": 20} | sampling)
    bench.engine.submit_together(GenerateTogether(tuple(
        Generate(number, TokenIds(tuple(prompt)), mix, settings) for number, mix in enumerate(mixes))))


def test_columns_of_a_comparison_begin_in_one_step_and_advance_together(make: Make) -> None:
    bench, prompt = make(step_tokens=64), random_ids(45)
    bench.submit(9, TokenIds(random_ids(5)), max_tokens=40)
    bench.run(2)
    _together(bench, [(), ONE, TWO, (*ONE, *TWO)], prompt, seed=5, **HOT)
    ahead: dict[int, int] = dict.fromkeys(range(4), 0)
    while bench.engine.busy:
        bench.events.clear()
        bench.engine.step()
        for event in bench.of(TextDelta):
            if event.request_id in ahead:
                ahead[event.request_id] = event.tokens
        if len([number for number in bench.engine.snapshot().running if number < 4]) == 4:
            assert len(set(ahead.values())) == 1
    assert set(ahead.values()) == {20}


def test_columns_share_the_base_before_their_invocations(make: Make) -> None:
    bench, prompt = make(), (*random_ids(48), 7, 8, 9, 20, 21)
    for name in NAMES:
        bench.engine.set_invocation(name, "cde")
    _together(bench, [(), ONE, TWO, THREE], prompt, max_tokens=3)
    bench.run()
    computed = sum(event.prefill_tokens for event in bench.of(StepFinished))
    assert computed <= 48 + 4 * 5, "the common 48 tokens are computed once"
    assert bench.engine.snapshot().kv.counters.hit_tokens >= 3 * 48


def test_a_group_that_cannot_be_is_refused_whole(make: Make) -> None:
    bench = make(slots=2)
    with pytest.raises(ValueError, match="no adapter 'nobody'"):
        _together(bench, [(), (AdapterUse("nobody"),)], random_ids(5))
    with pytest.raises(ValueError, match="2 is running already"):
        bench.submit(2)
        _together(bench, [(), ONE, TWO], random_ids(5))
    bench.run()
    bench.events.clear()
    _together(bench, [ONE, TWO, THREE], random_ids(5))
    bench.run()
    failed = bench.of(RequestFailed)
    assert {event.request_id for event in failed} == {0, 1, 2} and not bench.of(RequestStarted)
    assert failed[0].message.startswith("requests 0, 1, 2 run together: the mix needs 3 slots, there are 2")
    assert not bench.engine.busy and all(slot.users == 0 for slot in bench.engine.snapshot().slots)
    small = make(blocks=8)
    with pytest.raises(ValueError, match="the 3 prompts that are to run together of 120 tokens, and one of a reply, need 9 KV blocks"):
        _together(small, [(), ONE, TWO], random_ids(40))
    _together(small, [(), (), ()], random_ids(40), max_tokens=3)
    small.run()
    assert small.ids(0) == small.ids(1) == small.ids(2)


def test_a_member_that_is_aborted_leaves_the_others_alone(make: Make) -> None:
    bench, prompt = make(), random_ids(20)
    _together(bench, [ONE, TWO], prompt)
    _together_again = Generate(7, TokenIds(prompt), THREE, Sampling(max_tokens=3))
    bench.run(3)
    bench.engine.abort(0)
    bench.engine.submit(_together_again)
    bench.run()
    assert bench.finished(0).reason == "aborted" and len(bench.ids(1)) == 20 and len(bench.ids(7)) == 3


# -- preemption ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [{}, HOT])
def test_a_reply_is_the_same_alone_in_a_batch_and_after_preemption(make: Make, sampling: dict, seed: int) -> None:
    """Tiny pools, several requests, shared and own prefixes."""
    draw = random.Random(seed)
    shared = random_ids(24, seed)
    asked = [((*shared, *random_ids(draw.randint(1, 20), seed + number)), draw.choice(((), ONE, TWO, (*TWO, *ONE)))) for number in range(6)]
    bench = make(blocks=11)
    for number, (prompt, mix) in enumerate(asked):
        bench.submit(number, TokenIds(prompt), mix, max_tokens=40, seed=number, **sampling)
        bench.run(draw.randint(0, 3))
    bench.run()
    preempted = bench.of(RequestPreempted)
    assert any(event.tokens for event in preempted) and all("KV memory ran out" in event.because for event in preempted)
    again = {event.request_id for event in preempted}
    assert all(len(bench.started(number)) > 1 for number in again)
    assert bench.engine.snapshot().kv.counters.preemptions == len(preempted)
    fresh = make()
    for number, (prompt, mix) in enumerate(asked):
        fresh.engine.clear_cache()
        fresh.submit(number, TokenIds(prompt), mix, max_tokens=40, seed=number, **sampling)
        fresh.run()
        if sampling:
            assert bench.ids(number) == fresh.ids(number)
        else:
            assert fresh.same(prompt, mix, bench.ids(number), fresh.ids(number))
        assert bench.text(number) == fresh.text(number) or bench.ids(number) != fresh.ids(number)
    memory = bench.engine.model.memory
    assert memory.free == memory.blocks and all(slot.users == 0 for slot in bench.engine.snapshot().slots)


def test_a_reply_that_has_the_memory_alone_ends_for_it(make: Make) -> None:
    bench = make(blocks=3)
    bench.submit(1, TokenIds(random_ids(30)), max_tokens=100)
    bench.submit(2, TokenIds(random_ids(30, 1)), max_tokens=5)
    with pytest.raises(ValueError, match="the prompt of 48 tokens, and one of a reply, need 4 KV blocks of 16 tokens; the memory holds 3"):
        bench.submit(3, TokenIds(random_ids(48)))
    bench.run()
    assert bench.finished(1).reason == "memory" and len(bench.ids(1)) == 19 and bench.finished(2).reason == "length"
    assert bench.finished(1).detail.startswith("KV memory is full: its 3 blocks hold 48 tokens, this reply alone needs 4 blocks; ")


def test_of_replies_that_run_together_and_have_the_memory_alone_one_ends_for_it_and_the_others_go_on(make: Make) -> None:
    bench = make(blocks=5)
    bench.engine.submit_together(GenerateTogether(tuple(
        Generate(number, TokenIds(random_ids(20, number)), (), Sampling(temperature=0.0, max_tokens=40)) for number in (1, 2))))
    bench.run()
    ended = {event.request_id: event for event in bench.of(RequestFinished)}
    assert sorted(event.reason for event in ended.values()) == ["length", "memory"]
    (full,) = [event for event in ended.values() if event.reason == "memory"]
    assert "its 5 blocks hold 80 tokens, the 2 replies that run together need 6 blocks; ask for fewer together" in full.detail


def test_what_was_computed_before_a_splice_is_computed_again_as_it_was(make: Make) -> None:
    def run(bench: Bench, blocks: bool) -> tuple[int, ...]:
        bench.submit(1, TokenIds(random_ids(20)), max_tokens=60)
        bench.submit(2, TokenIds(random_ids(21, 1)), ONE, max_tokens=60)
        bench.run(10)
        bench.engine.set_mix(TWO, (2,))
        bench.run()
        assert bool(bench.of(RequestPreempted)) == blocks
        return bench.ids(2)

    tight, wide = make(blocks=8), make()
    assert run(tight, True) == run(wide, False)


def test_the_slots_of_a_former_mix_are_given_back_once_its_tokens_are_computed_again(make: Make) -> None:
    bench = make(blocks=8, step_tokens=16)
    bench.submit(1, TokenIds(random_ids(20)), max_tokens=60)
    bench.submit(2, TokenIds(random_ids(21, 1)), ONE, max_tokens=60)
    bench.run(10)
    bench.engine.set_mix(TWO, (2,))
    held = []
    while bench.engine.step():
        users = {slot.adapter: slot.users for slot in bench.engine.snapshot().slots}
        held.append(users["one"])
        assert users["two"] == 1 or not bench.engine.busy
    steps = held.count(1)
    assert held[0] == 0 and 1 <= steps <= 5, "to compute again what it acted on, and no longer"


def test_a_former_mix_that_is_gone_is_replaced_by_the_one_that_holds_and_that_is_said(make: Make) -> None:
    bench = make(blocks=8)
    bench.submit(1, TokenIds(random_ids(20)), max_tokens=60)
    bench.submit(2, TokenIds(random_ids(21, 1)), ONE, max_tokens=60)
    bench.run(10)
    bench.engine.set_mix(TWO, (2,))
    bench.engine.unload_adapter("one")
    bench.run()
    assert bench.of(RequestPreempted) and len(bench.ids(2)) == 60
    assert "all of it under the mix that holds now: one of its former mix is not loaded any more" in bench.started(2)[1].cache.remark


def test_two_that_were_stopped_and_need_each_others_slots_both_end(make: Make) -> None:
    bench = make(blocks=8, slots=2)
    for number, mix in ((1, ONE), (2, TWO), (3, ())):
        bench.submit(number, TokenIds(random_ids(20, number)), mix, max_tokens=50)
    bench.run(6)
    bench.engine.set_mix(THREE, (1,))
    bench.run()
    assert bench.of(RequestPreempted)
    assert [len(bench.ids(number)) for number in (1, 2, 3)] == [50, 50, 50]

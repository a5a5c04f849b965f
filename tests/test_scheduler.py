"""Scheduling without a model: order, shares of a step, blocks on demand, preemption, groups, waiting with the numbers, no starvation."""
from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_bench.engine.blocks import BLOCK_TOKENS
from lora_bench.engine.group import Group
from lora_bench.engine.kv_memory import KvMemory
from lora_bench.engine.mix import ActiveUse, TokenMix
from lora_bench.engine.mix_history import MixHistory
from lora_bench.engine.protocol import Sampling
from lora_bench.engine.request import Request, check_sampling
from lora_bench.engine.scheduler import MOST_PASSED, GroupRefused, Scheduler
from lora_bench.engine.shares import shares


class AllSlots:
    """Every adapter is in a slot."""

    def acquire(self, group: Group, alone: bool) -> str:
        return ""

    def lacking(self, group: Group) -> str:
        return ""

    def there(self, group: Group) -> bool:
        return True

    def give_back(self, group: Group) -> None:
        pass


def _scheduler(blocks: int, step_tokens: int = 16, max_running: int = 8, long_after: int = 0) -> Scheduler:
    return Scheduler(KvMemory(blocks, lambda *cells: None, lambda event: None), step_tokens, max_running, long_after)


def _request(number: int, prompt: int | Sequence[int], new: int = 10, scale: float = 0.0, start: int = 0) -> Request:
    ids = [1000 * abs(number) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    mix = TokenMix((), (ActiveUse("a", scale, start, "d"),)) if scale else TokenMix(())
    return Request(number, ids, len(ids), MixHistory.of(mix), Sampling(max_tokens=new), len(ids) + new, 1000, frozenset(),
                   None, None, None)  # type: ignore[arg-type]


def _admit_all(scheduler: Scheduler, slots: object = None) -> tuple[list[int], str]:
    admitted, because = [], ""
    while scheduler.waiting:
        begun, because = scheduler.next_admitted(slots or AllSlots())
        if not begun:
            break
        admitted += [request.id for request, _ in begun]
    return admitted, because


def _plan(scheduler: Scheduler) -> list[tuple[int, int, bool]]:
    """One step in which every draw gives 9; requests at their limit end."""
    works = scheduler.plan()
    plan = [(work.request.id, work.tokens, work.sampled) for work in works]
    for work, (_, _, sampled) in zip(works, plan, strict=True):
        work.request.commit(work.tokens)
        if sampled:
            work.request.ids.append(9)
    full = (full.request for full in scheduler.full)
    for request in (*full, *(request for request in scheduler.running if len(request.ids) >= request.limit)):
        scheduler.remove(request)
    return sorted(plan)


# -- shares of a step ---------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 500)), min_size=1, max_size=12), st.integers(1, 600))
def test_shares_use_the_budget_and_end_with_blocks(asked: list[tuple[int, int]], budget: int) -> None:
    got = shares(asked, budget)
    assert got[0] > 0 and sum(got) <= budget
    assert all(0 <= tokens <= wanted for tokens, (_, wanted) in zip(got, asked, strict=True))
    cut = [(stored + tokens) % BLOCK_TOKENS for tokens, (stored, wanted) in zip(got, asked, strict=True) if 0 < tokens < wanted]
    assert budget < BLOCK_TOKENS or not any(cut)
    assert sum(got) > budget - BLOCK_TOKENS or got == [wanted for _, wanted in asked]


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    assert shares([(0, 500), (0, 20)], 128) == [96, 20]
    assert shares([(0, 500), (0, 500)], 128) == [64, 64]
    assert shares([(8, 500), (0, 5), (0, 500)], 64) == [24, 5, 32]
    assert shares([(0, 500)] * 5, 64) == [16, 16, 16, 16, 0]


def test_replies_go_first_and_prompts_take_turns_where_there_is_not_a_block_for_each() -> None:
    scheduler = _scheduler(100)
    for number, prompt in enumerate((20, 10, 40)):
        scheduler.add(_request(number, prompt))
    assert _admit_all(scheduler) == ([0, 1, 2], "")
    assert _plan(scheduler) == [(0, 16, False)]
    assert _plan(scheduler) == [(0, 4, True), (1, 10, True)], "what does not fill a block goes to one that needs no more"
    assert _plan(scheduler) == [(0, 1, True), (1, 1, True), (2, 14, False)], "a step always gets on, if only by a part of a block"


# -- blocks -------------------------------------------------------------------------------------------
def test_a_request_begins_with_the_blocks_of_its_first_step_and_gets_more_as_it_grows() -> None:
    scheduler = _scheduler(10, step_tokens=32)
    scheduler.add(_request(0, 100, new=40))
    _admit_all(scheduler)
    assert scheduler.memory.free == 8
    for free in (8, 6, 4, 3):
        _plan(scheduler)
        assert scheduler.memory.free == free
    while scheduler.running:
        _plan(scheduler)
    assert scheduler.memory.free == 10


def test_the_oldest_waits_for_blocks_with_the_numbers_and_nobody_overtakes_it() -> None:
    scheduler = _scheduler(4, step_tokens=32)
    first, second, third = _request(0, 60), _request(1, 32), _request(2, 3)
    for request in (first, second, third):
        scheduler.add(request)
    assert _admit_all(scheduler)[0] == [0, 1], "each begins with two blocks"
    assert scheduler.waiting == [third]
    assert _admit_all(scheduler) == ([], "it needs up to 1 KV blocks, 0 of 4 are free")
    _plan(scheduler)
    scheduler.remove(second)
    assert _admit_all(scheduler) == ([2], "")


def test_the_latest_gives_its_blocks_to_the_first_and_goes_on_where_it_was() -> None:
    scheduler = _scheduler(6, step_tokens=64)
    old, young = _request(0, 40, new=40), _request(1, 30, new=18)
    scheduler.add(old)
    scheduler.add(young)
    _admit_all(scheduler)
    stopped = []
    while old in scheduler.running:
        _plan(scheduler)
        stopped += [(preempted.request.id, preempted.tokens) for preempted in scheduler.preempted]
        if scheduler.preempted:
            assert "request 0, which came first" in scheduler.preempted[0].because
            known = list(young.ids)
        _admit_all(scheduler)
    assert stopped and all(number == 1 for number, _ in stopped), "the first is never stopped"
    assert young.ids[: len(known)] == known
    _admit_all(scheduler)
    assert young.stored >= BLOCK_TOKENS, "of what it had computed the beginning is still there"
    while scheduler.running:
        _plan(scheduler)
    assert len(young.ids) == 48 and scheduler.memory.free == 6


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = _scheduler(5)
    scheduler.check_fits([_request(0, 79)])
    with pytest.raises(ValueError, match="the prompt of 80 tokens, and one of a reply, need 6 KV blocks of 16 tokens; the memory holds 5"):
        scheduler.check_fits([_request(0, 80)])


def test_a_reply_that_has_all_of_the_memory_and_needs_more_can_only_end() -> None:
    scheduler = _scheduler(3)
    request = _request(0, 30, new=100)
    scheduler.add(request)
    _admit_all(scheduler)
    while request in scheduler.running:
        _plan(scheduler)
        assert not scheduler.preempted
    assert [full.request for full in scheduler.full] == [request]
    assert len(request.ids) == 49, "48 tokens are stored, and the last one was drawn from them"


def test_who_waits_for_blocks_that_a_look_holds_waits_and_nothing_else_happens() -> None:
    scheduler = _scheduler(4)
    other = Scheduler(scheduler.memory, 16, 8)
    look = _request(-1, 20, new=12)
    assert other.run_whole(look) == ""
    assert other.run_whole(_request(-2, 50)) == "it needs 4 KV blocks, 2 of 4 are free"
    request = _request(0, 31, new=20)
    scheduler.add(request)
    _admit_all(scheduler)
    for _ in range(10):
        plan = _plan(scheduler)
    assert not plan and not scheduler.full and not scheduler.preempted and len(request.ids) == 33
    other.remove(look)
    assert _plan(scheduler) == [(0, 1, True)]


def test_a_block_that_another_computes_in_this_step_is_waited_for() -> None:
    scheduler = _scheduler(50, step_tokens=128)
    same = list(range(5000, 5040))
    for number, end in enumerate(([1], [2], [3])):
        scheduler.add(_request(number, [*same, *end], scale=0.5 * number, start=33))
    _admit_all(scheduler)
    assert _plan(scheduler) == [(0, 41, True)]
    assert _plan(scheduler) == [(0, 1, True), (1, 9, True), (2, 9, True)], "the third does not act before token 33"


def test_a_request_that_outgrows_the_short_factors_is_computed_again() -> None:
    scheduler = _scheduler(20, step_tokens=64, long_after=40)
    request = _request(0, 38)
    scheduler.add(request)
    _admit_all(scheduler)
    plans = [_plan(scheduler) for _ in range(5)]
    assert plans == [[(0, 38, True)], [(0, 1, True)], [(0, 1, True)], [(0, 41, True)], [(0, 1, True)]] and request.long


def test_prompts_alone_have_more_of_a_step_than_beside_replies() -> None:
    scheduler = Scheduler(KvMemory(50, lambda *cells: None, lambda event: None), 33, 8, alone_tokens=96)
    scheduler.add(_request(0, 100))
    _admit_all(scheduler)
    assert [tokens for _, tokens, _ in _plan(scheduler)] == [96] and [tokens for _, tokens, _ in _plan(scheduler)] == [4]
    scheduler.add(_request(1, 100))
    _admit_all(scheduler)
    assert sorted(tokens for _, tokens, _ in _plan(scheduler)) == [1, 32]


# -- groups -------------------------------------------------------------------------------------------
def test_a_group_begins_whole_and_draws_together() -> None:
    scheduler = _scheduler(50, step_tokens=48, max_running=4)
    scheduler.add(_request(0, 5))
    scheduler.add(*(_request(number, prompt, new=6) for number, prompt in ((1, 3), (2, 70), (3, 30))))
    scheduler.add(_request(4, 3))
    assert _admit_all(scheduler) == ([0, 1, 2, 3], "4 requests are running, the limit is 4")
    drawn: dict[int, int] = {}
    while len(scheduler.running) == 4:
        for number, _, sampled in _plan(scheduler):
            drawn[number] = drawn.get(number, 0) + sampled
        assert len({drawn.get(number, 0) for number in (1, 2, 3)}) == 1
    assert drawn[1] == 6


def test_a_group_whose_last_tokens_are_taken_over_goes_on_at_once() -> None:
    scheduler = _scheduler(5, step_tokens=16)
    for number in range(3):
        scheduler.add(_request(number, [5], new=1))
    scheduler.add(_request(3, range(16), new=2), _request(4, range(17), new=2))
    _admit_all(scheduler)
    while scheduler.running:
        assert _plan(scheduler), "those that run stand still"


def test_a_group_is_preempted_whole_and_the_rest_of_one_goes_on() -> None:
    scheduler = _scheduler(8, step_tokens=64)
    first = _request(0, 40, new=60)
    pair = [_request(1, 20, new=60), _request(2, 20, new=60)]
    scheduler.add(first)
    scheduler.add(*pair)
    _admit_all(scheduler)
    while not scheduler.preempted:
        _plan(scheduler)
    assert {preempted.request.id for preempted in scheduler.preempted} == {1, 2} and scheduler.waiting == pair
    scheduler.remove(pair[0])
    scheduler.remove(first)
    assert _admit_all(scheduler) == ([2], "")
    while scheduler.running:
        _plan(scheduler)
    assert len(pair[1].ids) == 80


def test_a_group_that_can_never_have_its_blocks_is_refused_and_what_is_common_counts_once() -> None:
    scheduler = _scheduler(6, max_running=4)
    with pytest.raises(ValueError, match="the 3 prompts that are to run together of 120 tokens, and one of a reply, need 9 KV blocks"):
        scheduler.check_fits([_request(number, 40) for number in range(3)])
    same = list(range(5000, 5040))
    scheduler.check_fits([_request(number, same) for number in range(3)])
    with pytest.raises(ValueError, match="need 9 KV blocks"):
        scheduler.check_fits([_request(number, same, scale=1.0 + number) for number in range(3)])
    with pytest.raises(ValueError, match="5 requests are to run together; at most 4 run at once"):
        scheduler.check_fits([_request(number, 1) for number in range(5)])


def test_a_group_that_fits_only_by_what_is_common_runs_to_its_end() -> None:
    scheduler = _scheduler(6, step_tokens=128, max_running=4)
    same = list(range(5000, 5040))
    group = [_request(number, same, new=8, scale=number, start=39) for number in range(4)]
    scheduler.check_fits(group)
    scheduler.add(*group)
    assert _admit_all(scheduler)[0] == [0, 1, 2, 3]
    for _ in range(100):
        _plan(scheduler)
    assert not scheduler.running and all(len(request.ids) == 48 for request in group)


def test_the_limit_of_running_requests() -> None:
    scheduler = _scheduler(50, max_running=2)
    for number in range(3):
        scheduler.add(_request(number, 4))
    assert _admit_all(scheduler) == ([0, 1], "2 requests are running, the limit is 2")


# -- slots --------------------------------------------------------------------------------------------
class FewSlots:
    """`count` slots; a request needs the adapter that its number says."""

    def __init__(self, count: int, adapter: dict[int, str]) -> None:
        self.count, self.adapter = count, adapter
        self.inside: list[str] = []
        self.held: dict[int, str] = {}

    def acquire(self, group: Group, alone: bool) -> str:
        wanted = {self.adapter[request.id] for request in group.requests}
        if len(wanted) > self.count:
            raise GroupRefused(group, ValueError("too many"))
        idle = [name for name in self.inside if name not in {*self.held.values(), *wanted}]
        missing = [name for name in wanted if name not in self.inside]
        if len(missing) > self.count - len(self.inside) + len(idle):
            return "slots are in use"
        for name in missing:
            if len(self.inside) == self.count:
                self.inside.remove(idle.pop(0))
            self.inside.append(name)
        self.held |= {request.id: self.adapter[request.id] for request in group.requests}
        return ""

    def lacking(self, group: Group) -> str:
        return ""

    def there(self, group: Group) -> bool:
        return all(self.adapter[request.id] in self.inside for request in group.requests)

    def give_back(self, group: Group) -> None:
        for request in group.requests:
            if not group.preempted:
                del self.held[request.id]


def test_what_the_slots_lack_is_passed_on_and_nothing_is_held() -> None:
    scheduler, slots = _scheduler(5), FewSlots(1, {0: "a", 1: "b"})
    scheduler.add(_request(0, 4))
    scheduler.add(_request(1, 4))
    assert _admit_all(scheduler, slots) == ([0], "slots are in use")
    assert scheduler.memory.free == 4 and slots.held == {0: "a"}


def test_slots_are_given_back_when_there_are_no_blocks() -> None:
    scheduler, slots = _scheduler(2, step_tokens=32), FewSlots(2, {0: "a", 1: "b"})
    scheduler.add(_request(0, 30))
    scheduler.add(_request(1, 4))
    assert _admit_all(scheduler, slots)[0] == [0] and slots.held == {0: "a"}


def test_who_waits_for_a_slot_is_passed_only_so_often() -> None:
    scheduler = _scheduler(500, max_running=200)
    slots = FewSlots(1, {number: "b" if number == 1 else "a" for number in range(100)})
    for number in range(100):
        scheduler.add(_request(number, 4, new=1000))
    assert _admit_all(scheduler, slots)[0] == [0, *range(2, MOST_PASSED + 2)]
    for request in scheduler.running:
        scheduler.remove(request)
        slots.held.pop(request.id)
    assert _admit_all(scheduler, slots)[0][0] == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_nobody_starves(seed: int) -> None:
    """Random groups over few slots and blocks, more arriving all the time: each ends, and is passed only so often."""
    draw = random.Random(seed)
    scheduler, adapters = _scheduler(draw.randint(6, 20), step_tokens=draw.choice((16, 64)), max_running=6), {}
    slots, number, arrived, groups = FewSlots(draw.randint(1, 3), adapters), 0, {}, []

    def arrive() -> None:
        nonlocal number
        adapter = draw.choice("abcd")
        members = [_request(number + i, draw.choice((3, 20, 50)) if i == 0 else 5, new=draw.choice((1, 4, 30)))
                   for i in range(draw.choice((1, 1, 1, 2)))]
        adapters.update({request.id: adapter for request in members})
        number += len(members)
        scheduler.check_fits(members)
        scheduler.add(*members)
        groups.append(scheduler.queue[-1])
        arrived.update({request.id: steps for request in members})

    steps = 0
    while steps < 60 or arrived:
        steps += 1
        if steps < 60 and draw.random() < 0.5:
            arrive()
        _admit_all(scheduler, slots)
        _plan(scheduler)
        alive = {request.id for request in (*scheduler.running, *scheduler.waiting)}
        for ended in arrived.keys() - alive:
            del arrived[ended]
            slots.held.pop(ended, None)
        assert steps < 4000, f"{sorted(arrived)} never end"
    assert scheduler.memory.free == scheduler.memory.blocks and not slots.held
    assert all(group.passed <= MOST_PASSED for group in groups)


@pytest.mark.parametrize("setting,value", [
    ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1),
    ("repetition_penalty", 0.0), ("repetition_penalty", float("inf")), ("max_tokens", 0),
])
def test_settings_without_a_meaning_are_named(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting} is "):
        check_sampling(Sampling(**{setting: value}))

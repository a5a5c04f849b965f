"""Scheduling without a model: order, budgets, reservations, waiting with the numbers."""
from __future__ import annotations

import pytest

from lora_bench.engine.blocks import BlockPool
from lora_bench.engine.mix import TokenMix
from lora_bench.engine.protocol import Sampling
from lora_bench.engine.request import Request, check_sampling
from lora_bench.engine.scheduler import Scheduler


def _request(number: int, prompt: int, new: int = 10) -> Request:
    ids = [7] * prompt
    return Request(number, ids, prompt, TokenMix(()), Sampling(max_tokens=new), prompt + new, 1000, frozenset(), None, None, None)  # type: ignore[arg-type]


def _admit_all(scheduler: Scheduler) -> tuple[list[int], str]:
    admitted, because = [], ""
    while scheduler.waiting:
        request, because = scheduler.next_admitted(lambda request: "")
        if request is None:
            break
        admitted.append(request.id)
    return admitted, because


def _plan(scheduler: Scheduler) -> list[tuple[int, int, bool]]:
    works = scheduler.plan()
    plan = [(work.request.id, work.tokens, work.sampled) for work in works]
    for work in works:
        if work.sampled:
            work.request.ids.append(9)
        work.request.stored += work.tokens
    return plan


def test_prompts_share_the_budget_in_order_and_replies_go_first() -> None:
    scheduler = Scheduler(BlockPool(100), step_tokens=16, max_running=8)
    for number, prompt in enumerate((20, 10, 3)):
        scheduler.add(_request(number, prompt))
    assert _admit_all(scheduler) == ([0, 1, 2], "")
    assert _plan(scheduler) == [(0, 16, False)]
    assert _plan(scheduler) == [(0, 4, True), (1, 10, True), (2, 2, False)]
    assert _plan(scheduler) == [(0, 1, True), (1, 1, True), (2, 1, True)]
    scheduler.add(_request(3, 40))
    _admit_all(scheduler)
    assert _plan(scheduler) == [(0, 1, True), (1, 1, True), (2, 1, True), (3, 13, False)]


def test_the_oldest_waits_for_blocks_and_nobody_overtakes_it() -> None:
    scheduler = Scheduler(BlockPool(5), step_tokens=16, max_running=8)
    big, bigger, small = _request(0, 40), _request(1, 60), _request(2, 3)
    for request in (big, bigger, small):
        scheduler.add(request)
    admitted, because = _admit_all(scheduler)
    assert admitted == [0] and because == "it needs 5 KV blocks, 1 of 5 are free"
    scheduler.remove(big)
    assert _admit_all(scheduler)[0] == [1]
    scheduler.remove(bigger)
    assert _admit_all(scheduler)[0] == [2]
    scheduler.remove(small)
    assert scheduler.pool.free == 5


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(BlockPool(5), step_tokens=16, max_running=8)
    with pytest.raises(ValueError, match="needs 6 KV blocks .*holds 5"):
        scheduler.check_fits(_request(0, 75))


def test_the_limit_of_running_requests() -> None:
    scheduler = Scheduler(BlockPool(50), step_tokens=16, max_running=2)
    for number in range(3):
        scheduler.add(_request(number, 4))
    assert _admit_all(scheduler) == ([0, 1], "2 requests are running, the limit is 2")


def test_what_the_slots_lack_is_passed_on_and_nothing_is_reserved() -> None:
    scheduler = Scheduler(BlockPool(5), step_tokens=16, max_running=8)
    scheduler.add(_request(0, 4))
    assert scheduler.next_admitted(lambda request: "slots are in use") == (None, "slots are in use")
    assert scheduler.pool.free == 5 and scheduler.waiting


@pytest.mark.parametrize("setting,value", [
    ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1),
    ("repetition_penalty", 0.0), ("repetition_penalty", float("inf")), ("max_tokens", 0),
])
def test_settings_without_a_meaning_are_named(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting} is "):
        check_sampling(Sampling(**{setting: value}))

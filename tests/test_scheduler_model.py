"""Random lives of groups of requests under a scheduler with few blocks and few slots: what is promised of every step."""
from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_kv import BLOCK, Truth, Truths
from properties import check

from lora_bench.engine.blocks import blocks_for
from lora_bench.engine.group import Group
from lora_bench.engine.kv_memory import KvMemory
from lora_bench.engine.mix import ActiveUse, TokenMix
from lora_bench.engine.mix_history import MixHistory
from lora_bench.engine.protocol import Sampling
from lora_bench.engine.request import Request
from lora_bench.engine.scheduler import MOST_PASSED, GroupRefused, Scheduler

STEMS = ([3] * 90, [4, 5] * 45)
MIXES = ((), (), (("a", 1.0),), (("a", 0.5),), (("b", 1.0),), (("c", 1.0),), (("a", 1.0), ("b", 1.0)))
Chosen = tuple[tuple[str, float], ...]
MIX = st.sampled_from(MIXES)
ASKED = st.tuples(st.sampled_from([0, 0, 1, 15, 16, 40]), MIX, st.sampled_from([0, 0, 16, 33]), st.sampled_from([1, 3, 25, 70]))
"""tokens of its own, mix, from which token on it acts, tokens of the reply"""
MOST_WAITING = 12
ready = precondition(lambda self: hasattr(self, "scheduler"))


class NaiveSlots:
    """`count` slots: a set of names, of which those that running requests hold stay."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.inside: list[str] = []
        self.held: dict[int, set[str]] = {}

    def acquire(self, group: Group, alone: bool) -> str:
        wanted = {name for request in group.requests for name in request.history.names}
        if len(wanted) > self.count:
            raise GroupRefused(group, ValueError("too many"))
        own = {request.id for request in group.requests}
        fixed = set().union(*(names for number, names in self.held.items() if number not in own))
        if len(wanted | fixed) > self.count:
            return "slots are in use"
        idle = [name for name in self.inside if name not in wanted | fixed]
        room = self.count - len(wanted | fixed)
        self.inside = [*sorted(wanted | fixed), *idle[:room]]
        self.held |= {request.id: set(request.history.names) for request in group.requests}
        for request in group.requests:
            request.holds_former = len(request.history.parts) > 1
        return ""

    def lacking(self, group: Group) -> str:
        return ""

    def there(self, group: Group) -> bool:
        return all(name in self.inside for request in group.requests for name in request.history.names)

    def give_back(self, group: Group) -> None:
        for request in group.requests:
            self.held.pop(request.id, None)


class SchedulerMachine(RuleBasedStateMachine):
    """A step computes truths (model_kv.py) into the cells that its works have."""

    @initialize(blocks=st.integers(4, 16), step_tokens=st.sampled_from([8, 32, 64]), slots=st.integers(1, 3))
    def open(self, blocks: int, step_tokens: int, slots: int) -> None:
        self.cells: list[list[Truth]] = [[-1] * BLOCK for _ in range(blocks)]
        self.memory = KvMemory(blocks, self._copy, lambda event: None)
        self.scheduler = Scheduler(self.memory, step_tokens, max_running=5)
        self.slots, self.truths, self.step_tokens = NaiveSlots(slots), Truths(), step_tokens
        self.alive: dict[int, Request] = {}
        self.group_of: dict[int, int] = {}
        """request -> its group, numbered in the order of arrival"""
        self.begun: set[int] = set()
        """groups that have begun once"""
        self.passed: Counter[int] = Counter()
        """by group that has never begun: later ones that began before it"""
        self.number = self.steps = 0

    # -- what people do ------------------------------------------------------------------------------
    @ready
    @rule(stem=st.sampled_from(STEMS), cut=st.sampled_from([1, 16, 30, 48, 70]), asked=st.lists(ASKED, min_size=1, max_size=3))
    def ask(self, stem: list[int], cut: int, asked: list[tuple[int, Chosen, int, int]]) -> None:
        """One request, or some that begin alike and run together."""
        if len(self.scheduler.waiting) > MOST_WAITING:
            return
        requests = [self._request(stem[:cut] + [6 + place] * own, *rest) for place, (own, *rest) in enumerate(asked)]
        names = {name for request in requests for name in request.history.names}
        if len(names) > self.slots.count:
            return
        alone = sum(blocks_for(len(request.ids) + 1) for request in requests)
        if len(requests) == 1 and alone > self.memory.blocks:
            with pytest.raises(ValueError, match=f"need {alone} KV blocks of 16 tokens; the memory holds {self.memory.blocks}"):
                self.scheduler.check_fits(requests)
            return
        try:
            self.scheduler.check_fits(requests)
        except ValueError:
            assert alone > self.memory.blocks, "what fits was refused"
            return
        self.scheduler.add(*requests)
        for request in requests:
            self.alive[request.id] = request
            self.group_of[request.id] = requests[0].id

    @ready
    @rule(count=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @ready
    @rule(who=st.integers(0, 20))
    def abort(self, who: int) -> None:
        if self.alive:
            self._end([*self.alive.values()][who % len(self.alive)])

    @ready
    @rule(who=st.integers(0, 20), mix=MIX)
    def change_mix(self, who: int, mix: Chosen) -> None:
        """Of a request that runs, from its next token on, with the adapters that it holds."""
        if not (running := self.scheduler.running):
            return
        request = running[who % len(running)]
        if {name for name, _ in mix} <= self.slots.held[request.id]:
            request.history = request.history.spliced(request.settled, self._mix(mix, 0))

    # -- what must hold ------------------------------------------------------------------------------
    @ready
    @invariant()
    def everybody_is_somewhere(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert Counter(request.id for request in (*running, *waiting)) == Counter(self.alive.keys())
        assert all(request.table is not None for request in running) and all(request.table is None for request in waiting)
        assert len({self.group_of[request.id] for request in running} & {self.group_of[request.id] for request in waiting}) == 0

    @ready
    @invariant()
    def every_cell_is_what_its_request_would_compute(self) -> None:
        for request in self.scheduler.running:
            truths, table = self._truths(request), request.table.blocks
            assert [self.cells[table[at // BLOCK]][at % BLOCK] for at in range(request.stored)] == truths[:request.stored]

    @ready
    @invariant()
    def of_a_group_none_is_ahead(self) -> None:
        by_group: dict[int, set[int]] = {}
        for request in self.alive.values():
            by_group.setdefault(self.group_of[request.id], set()).add(request.new_tokens)
        assert all(len(drawn) == 1 for drawn in by_group.values())

    @ready
    @invariant()
    def nobody_is_passed_for_ever(self) -> None:
        assert all(count <= MOST_PASSED for count in self.passed.values())

    def teardown(self) -> None:
        """All that was asked for comes to its end, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        left = sum(len(request.ids) + request.limit for request in self.alive.values())
        for _ in range(20 * left + 20):
            if not self.alive:
                break
            self._step()
        assert not self.alive, "some never end"
        assert self.memory.free == self.memory.blocks and not self.slots.held
        self.memory.clear("the test is over")
        assert [run.mix for run in self.memory.view([]).runs] == [-1]

    # -- inside --------------------------------------------------------------------------------------
    def _request(self, ids: list[int], mix: Chosen, start: int, new: int) -> Request:
        self.number += 1
        return Request(self.number, ids, len(ids), MixHistory.of(self._mix(mix, start)), Sampling(max_tokens=new), len(ids) + new, 1000,
                       frozenset(), None, None, None)  # type: ignore[arg-type]

    def _mix(self, mix: Chosen, start: int) -> TokenMix:
        return TokenMix((), tuple(ActiveUse(name, scale, start, name * 4) for name, scale in mix))

    def _truths(self, request: Request) -> list[Truth]:
        return self.truths.all(request.ids, request.history.stretches, b"")

    def _copy(self, source: int, target: int, cells: int) -> None:
        self.cells[target][:cells] = self.cells[source][:cells]

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.slots.held.pop(request.id, None)
        del self.alive[request.id]

    def _admit(self) -> None:
        while self.scheduler.waiting:
            first = self.group_of[self.scheduler.waiting[0].id]
            begun, because = self.scheduler.next_admitted(self.slots)
            assert bool(begun) != bool(because)
            if not begun:
                return
            groups = {self.group_of[request.id] for request, _ in begun}
            assert len(groups) == 1 and {request.id for request, _ in begun} == {
                number for number in self.alive if self.group_of[number] in groups}, "a group begins whole"
            (group,) = groups
            if group != first:
                assert first not in self.begun or group > first
            for number in {self.group_of[request.id] for request in self.scheduler.waiting} - self.begun:
                self.passed[number] += number < group and group not in self.begun
            self.begun.add(group)
            self.passed.pop(group, None)

    def _step(self) -> None:
        """As the engine steps: every draw gives a token that depends on what acts."""
        self._admit()
        scheduler = self.scheduler
        before, ran = [*scheduler.waiting], [*scheduler.running]
        works = scheduler.plan()
        self._check_stopped(before, ran)
        for request in [full.request for full in scheduler.full]:
            stopped = {preempted.request.id for preempted in scheduler.preempted}
            assert {self.group_of[other.id] for other in ran if other.id not in stopped} == {self.group_of[request.id]}
            self._end(request)
        working = [work.request.id for work in works]
        assert len(set(working)) == len(working) and set(working) <= {request.id for request in scheduler.running}
        assert all(1 <= work.tokens <= work.request.pending for work in works)
        assert sum(work.tokens for work in works) <= max(self.step_tokens, len(works) + 1)
        assert works or not scheduler.running or scheduler.preempted or scheduler.full, "those that run stand still"
        self._check_prompts_are_computed_once([work for work in works if not work.sampled or work.tokens > 1])
        sampled = [work.request for work in works if work.sampled]
        for work in works:
            self._compute(work.request, work.tokens)
        for request in sampled:
            request.ids.append(7 + self._truths(request)[-1] % 3)
        for request in [request for request in scheduler.running if len(request.ids) >= request.limit]:
            self._end(request)

    def _check_stopped(self, before: list[Request], ran: list[Request]) -> None:
        """Whole groups, the latest ones where they stop for blocks; they are the next to go on, and their requests are as they were."""
        stopped = {self.group_of[preempted.request.id] for preempted in self.scheduler.preempted}
        assert {preempted.request.id for preempted in self.scheduler.preempted} == {
            request.id for request in ran if self.group_of[request.id] in stopped}
        left = {self.group_of[request.id] for request in self.scheduler.running}
        for_blocks = {self.group_of[each.request.id] for each in self.scheduler.preempted if "KV memory ran out" in each.because}
        assert not for_blocks or max(left, default=0) < min(for_blocks), "a group stops for one that came later"
        assert self.scheduler.waiting[len(self.scheduler.waiting) - len(before):] == before

    def _check_prompts_are_computed_once(self, works: list[object]) -> None:
        whole: Counter[Truth] = Counter()
        for work in works:
            truths, stored = self._truths(work.request), work.request.stored
            whole.update({truths[end - 1] for end in range(BLOCK, stored + work.tokens + 1, BLOCK) if end > stored})
        assert all(count == 1 for count in whole.values()), "two compute one block in one step"

    def _compute(self, request: Request, tokens: int) -> None:
        truths, stored, table = self._truths(request), request.stored, request.table
        for at in range(stored, stored + tokens):
            block, cell = divmod(table.cell(at), BLOCK)
            users = [other for other in self.scheduler.running if block in other.table.blocks]
            assert users == [request], "two requests write one block"
            self.cells[block][cell] = truths[at]
        request.commit(tokens)


def test_the_scheduler_keeps_its_promises() -> None:
    check(SchedulerMachine, 60)

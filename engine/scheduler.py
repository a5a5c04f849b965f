"""Who computes what in the next step: first come, first served, running replies before new prompts, groups whole."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from .blocks import BLOCK_TOKENS, blocks_for
from .group import Group
from .kv_memory import KvMemory
from .protocol import CacheUse, requests_text
from .request import Request
from .shares import shares

MOST_PASSED = 16
"""times that a group which waits for slots lets a later one through whose adapters are in slots: more would starve it"""
LOOKED_AT = 64
"""waiting groups that are looked at for one that can be let through, a bound for the work of a step"""


class Slots(Protocol):
    """The adapters of groups in their slots."""

    def acquire(self, group: Group, alone: bool) -> str:
        """Hold the slots of all its mixes; "" when it has them, else what it must wait for. `alone`: nothing runs that could end.

        Those of former mixes too: `Request.holds_former` says so then, and without them what they acted on is not computed again.
        Raises GroupRefused when it can never have them.
        """

    def lacking(self, group: Group) -> str:
        """Which of its adapters must be read or made ready before it can have its slots, in words; "" for none."""

    def there(self, group: Group) -> bool:
        """Whether every adapter of its mixes is in a slot already."""

    def give_back(self, group: Group) -> None:
        """It waits again and holds nothing; if it ran before, what it held then."""


class GroupRefused(Exception):
    """`group` can never run, for `cause`."""

    def __init__(self, group: Group, cause: Exception) -> None:
        super().__init__(str(cause))
        self.group, self.cause = group, cause


@dataclass(frozen=True, slots=True)
class Work:
    """The next `tokens` tokens of `request`."""

    request: Request
    tokens: int

    @property
    def sampled(self) -> bool:
        return self.tokens == self.request.pending


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request whose blocks others needed; `tokens` were stored."""

    request: Request
    because: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Full:
    """A request that needs more than all of the memory, which its group has for itself; it can only end."""

    request: Request
    because: str


class Scheduler:
    """Groups that wait and that run. A running request holds the blocks of what is stored of it and gets more as it grows.

    When they run out the latest arrived group goes back to the front of the queue: what it had computed stays findable until others
    need its blocks, so it computes again only what is gone then.
    """

    def __init__(self, memory: KvMemory, step_tokens: int, max_running: int, long_after: int = 0, alone_tokens: int = 0) -> None:
        """`long_after`: requests of more tokens are computed by other RoPE factors (ModelFacts.long_after); 0 for models without such.
        `alone_tokens`: of a step without replies; 0: as many as of any."""
        self.memory = memory
        self.preempted: list[Preempted] = []
        """by the last plan"""
        self.full: list[Full] = []
        """by the last plan"""
        self._queue: deque[Group] = deque()
        self._groups: list[Group] = []
        """that run, by number"""
        self._of: dict[int, Group] = {}
        self._alone_tokens = max(alone_tokens, step_tokens)
        self._step_tokens, self._max_running, self._long_after = step_tokens, max_running, long_after
        self._arrivals = 0
        self._served: dict[int, int] = {}
        """request that computes its prompt -> the last plan that had tokens for it"""
        self._plans = 0

    # -- who is there ----------------------------------------------------------------------------
    @property
    def running(self) -> list[Request]:
        return [request for group in self._groups for request in group.requests]

    @property
    def waiting(self) -> list[Request]:
        """The next one first."""
        return [request for group in self._queue for request in group.requests]

    @property
    def queue(self) -> Sequence[Group]:
        return self._queue

    def check_fits(self, requests: Sequence[Request]) -> None:
        """Raises ValueError, with the numbers, when they could not run together even with nothing beside them."""
        need, there = Group(list(requests), 0).least_blocks, self.memory.blocks
        if len(requests) > self._max_running:
            raise ValueError(f"{len(requests)} requests are to run together; at most {self._max_running} run at once")
        if need > there:
            what = "the prompt" if len(requests) == 1 else f"the {len(requests)} prompts that are to run together"
            raise ValueError(f"{what} of {sum(request.prompt_tokens for request in requests)} tokens, and one of a reply, need {need} "
                             f"KV blocks of {BLOCK_TOKENS} tokens; the memory holds {there}; shorten the prompt")

    def add(self, *requests: Request) -> None:
        """Queue requests that run together and fit (see `check_fits`)."""
        self._arrivals += 1
        group = Group(list(requests), self._arrivals)
        self._queue.append(group)
        self._of |= {request.id: group for request in requests}

    def remove(self, request: Request, keep: bool = True) -> None:
        """Forget a request, running or waiting, and free its blocks; with `keep` what they hold can be found again."""
        request.end(keep)
        self._served.pop(request.id, None)
        group = self._of.pop(request.id)
        group.requests.remove(request)
        if not group.requests:
            (self._groups if group in self._groups else self._queue).remove(group)

    # -- admission -------------------------------------------------------------------------------
    def next_admitted(self, slots: Slots) -> tuple[list[tuple[Request, CacheUse]], str]:
        """Let the next waiting group run, if one can.

        Returns (its requests, which run now, or none; what the first one of the queue waits for or ""). Raises GroupRefused; the group
        waits still then.
        """
        because, passed = "", []
        for group in islice(self._queue, LOOKED_AT):
            if lacking := slots.lacking(group):  # what passes it does not make it wait longer
                because = because or lacking
                continue
            if lacks := self._lacks(group):
                return [], because or lacks
            if passed and not slots.there(group):
                passed.append(group)
                continue
            if lacks := slots.acquire(group, not self._groups):
                because = because or lacks
                passed.append(group)
            elif isinstance(begun := self._begin(group), str):
                slots.give_back(group)
                return [], because or begun
            else:
                for other in passed:
                    other.passed += 1
                return begun, ""
            if any(other.passed >= MOST_PASSED for other in passed):
                break
        return [], because

    def run_whole(self, request: Request) -> str:
        """Let a request that nobody waits for run with all blocks that it can ever need; "" or what it lacks, nothing changes then."""
        group = Group([request], 0, whole=True)
        self._open(request)
        need, free = blocks_for(request.limit) - len(request.table.blocks), self.memory.free
        if not request.reserve(request.limit - request.stored):
            request.end()
            return f"it needs {need} KV blocks, {free} of {self.memory.blocks} are free"
        self._of[request.id] = group
        self._groups.append(group)
        return ""

    def _lacks(self, group: Group) -> str:
        """What is known to be missing without a look."""
        if len(running := self.running) + len(group.requests) > self._max_running:
            return f"{len(running)} requests are running, the limit is {self._max_running}"
        if self._groups and self.memory.free <= group.lacking:
            return self._lacking(group)
        return ""

    def _lacking(self, group: Group) -> str:
        blocks = sum(blocks_for(self._first_tokens(group, request)) for request in group.requests)
        return (f"{'they need' if len(group.requests) > 1 else 'it needs'} up to {blocks} KV blocks, "
                f"{self.memory.free} of {self.memory.blocks} are free")

    def _first_tokens(self, group: Group, request: Request) -> int:
        """Tokens that there must be blocks for to begin: those of a first step; for one that was preempted all, lest it come and go."""
        if group.preempted:
            return len(request.ids) + 1
        return min(len(request.ids), max(self._step_tokens // len(group.requests), BLOCK_TOKENS))

    def _begin(self, group: Group) -> list[tuple[Request, CacheUse]] | str:
        begun = [(request, self._open(request)) for request in group.requests]
        wanted = {request: max(self._first_tokens(group, request) - request.stored, 1) for request in group.requests}
        if not self._groups and self._blocks_for(wanted) > self.memory.free:  # what it has in common is not computed yet, so not counted
            wanted = dict.fromkeys(wanted, 1)
        if self._blocks_for(wanted) > self.memory.free or not all(request.reserve(tokens) for request, tokens in wanted.items()):
            for request in group.requests:
                request.end()
            group.lacking = self.memory.free
            return self._lacking(group)
        self._queue.remove(group)
        self._groups.append(group)
        self._groups.sort(key=lambda group: group.number)
        now = time.perf_counter()
        for request in group.requests:
            request.started = request.started or now
        return begun

    def _blocks_for(self, wanted: Mapping[Request, int]) -> int:
        """Blocks that are lacking for so many more tokens of each."""
        return sum(max(blocks_for(request.stored + tokens) - len(request.table.blocks), 0) for request, tokens in wanted.items())

    def _open(self, request: Request) -> CacheUse:
        request.long = 0 < self._long_after < len(request.ids)
        return request.begin(self.memory)

    # -- the step --------------------------------------------------------------------------------
    def plan(self) -> list[Work]:
        """A token for every reply under way; the rest of the step's tokens to the prompts, evenly.

        Who had to stop for lack of blocks is in `preempted` and `full` then. Empty when nothing can be computed.
        """
        self.preempted, self.full = [], []
        self._plans += 1
        if self._long_after:
            self._compute_grown_again()
        for group in [group for group in self._groups if any(request.lacks_former for request in group.requests)]:
            self._set_back(group, "what it said under its former mixes is computed again, and these must have slots first")
        coming = [group for group in self._groups if not group.ready]
        return self._with_blocks(self._with_prompts(coming) if coming else [Work(request, 1) for request in self.running])

    def _with_prompts(self, coming: Sequence[Group]) -> list[Work]:
        """A token for every reply, the rest for the prompts of `coming`."""
        prompts = self._prompts(coming)  # before it is known who is ready: what they take over of others may be all that was left
        coming = [group for group in coming if not group.ready]
        ready = [request for group in self._groups if group not in coming for request in group.requests]
        prompts = [(request, wanted) for request, wanted in prompts if self._of[request.id] in coming]
        most = max(self._step_tokens - len(ready), 1) if ready else self._alone_tokens
        parts = shares([(request.stored, wanted) for request, wanted in prompts], most)
        works = [Work(request, 1) for request in ready]
        for (request, _), tokens in zip(prompts, parts, strict=True):
            if tokens:
                self._served[request.id] = self._plans
                works.append(Work(request, tokens))
        return works

    def _prompts(self, unready: Sequence[Group]) -> list[tuple[Request, int]]:
        """The requests of `unready` with more than one token to compute and how many they may, those longest without a turn first.

        One whose next block another computes in this step waits for it. The last token of a group's prompt waits until all have come so
        far: they draw their first tokens together.
        """
        computed: set[bytes] = set()
        found = []
        waiting = [(group, request) for group in unready for request in group.requests]
        for group, request in sorted(waiting, key=lambda one: (self._served.get(one[1].id, 0), one[0].number)):
            if request.pending > 1:
                request.extend()
            wanted = request.pending - (len(group.requests) > 1)
            key = request.next_key() if wanted else None
            if not wanted or key in computed:
                continue
            if key is not None:
                computed.add(key)
            found.append((request, wanted))
        return found

    def _with_blocks(self, works: Sequence[Work]) -> list[Work]:
        """Those of `works` that there are blocks for; earlier groups take them from later ones."""
        kept: list[Work] = []
        stopped: set[int] = set()
        for work in sorted(works, key=lambda work: self._of[work.request.id].number):
            group = self._of[work.request.id]
            while work.request.table is not None and not work.request.reserve(work.tokens):
                if len(self._groups) > 1:
                    self._preempt(self._groups[-1], group)
                elif self._others_hold_blocks():
                    stopped.add(work.request.id)
                    break
                else:
                    self.full.append(Full(work.request, self._outgrown(group, work)))
                    work.request.end()
                    break
            else:
                kept.append(work)
        if self.preempted:
            kept = [work for work in kept if work.request.table is not None]
        return self._in_step(kept, stopped) if stopped else kept

    def _outgrown(self, group: Group, work: Work) -> str:
        there = self.memory.blocks
        need = there - self.memory.free + blocks_for(work.request.stored + work.tokens) - len(work.request.table.blocks)
        who = f"the {count} replies that run together need" if (count := len(group.requests)) > 1 else "this reply alone needs"
        way = "ask for fewer together" if count > 1 else "begin a new chat"
        return (f"KV memory is full: its {there:,} blocks hold {there * BLOCK_TOKENS:,} tokens, {who} {need:,} blocks; {way}, shorten the "
                "prompt, or load the model with a larger context")

    def _in_step(self, works: list[Work], stopped: set[int]) -> list[Work]:
        """`works` without the draws of groups of which one cannot draw now."""
        late = {self._of[number].number for number in stopped}
        return [work for work in works if not (work.sampled and self._of[work.request.id].number in late)]

    def _preempt(self, group: Group, for_: Group) -> None:
        self._set_back(group, (
            f"KV memory ran out: its blocks go to {requests_text(request.id for request in for_.requests)}, which came first" if
            group is not for_ else f"KV memory ran out: the {self.memory.blocks} blocks hold what came first"))

    def _set_back(self, group: Group, because: str) -> None:
        self._groups.remove(group)
        self._queue.appendleft(group)
        group.preempted, group.lacking = True, -1
        for request in group.requests:
            self.preempted.append(Preempted(request, because, request.stored))
            request.end()
            request.waits_for = ""

    def _others_hold_blocks(self) -> bool:
        """Whether blocks are held by others than the requests that run here, who will give them back."""
        own = {block for request in self.running if request.table is not None for block in request.table.blocks}
        return len(own) < self.memory.blocks - self.memory.free

    def _compute_grown_again(self) -> None:
        """What is stored of a request that has just grown beyond `long_after` tokens was turned by the short factors: as transformers does,
        all of it is computed again, with the long ones."""
        for request in self.running:
            if not request.long and len(request.ids) > self._long_after:
                request.end()
                self._open(request)
                if self._of[request.id].whole:
                    request.reserve(request.limit - request.stored)

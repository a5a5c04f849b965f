"""Who decodes and reads prompts for `bench`, and how fast it was: the engine of this process, and a llama-server beside it."""
from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from .bench_errors import NotMeasured
from .protocol import Generate, Mix, RequestFailed, Sampling, StepFinished, TokenIds

if TYPE_CHECKING:
    from .bench_server import LlamaServer
    from .engine import Engine

Chats = Sequence[tuple[Sequence[int], Mix]]
"""the prompt and the mix of each"""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one thing was, once."""

    tokens_per_second: float
    """of all chats together"""
    at_once: int = 1
    """chats that decoded beside each other"""
    split: dict[str, float] = field(default_factory=dict)
    """mean ms of a step by op, where it is known"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """When a reply was drawn [s, of one clock]."""

    first: float
    last: float
    """the first and the last of its tokens"""
    after_first: int
    """tokens"""


class Speeds(Protocol):
    """Whoever is measured. Replies are greedy, and none ends before it has the length that was asked for."""

    def decode(self, chats: Chats, tokens: int) -> Speed:
        """Replies of so many tokens, asked for at once; prompts and first tokens are not counted. Raises NotMeasured."""

    def prefill(self, ids: Sequence[int]) -> Speed:
        """A prompt of which nothing is stored, on the base, with its first token. Raises NotMeasured."""


class OwnSpeeds:
    """The engine of this process. Of replies the steps count in which all of them decode."""

    def __init__(self, engine: Engine, events: list[Any]) -> None:
        self._engine, self._events = engine, events

    def decode(self, chats: Chats, tokens: int) -> Speed:
        self._submit(chats, tokens)
        drawn, seconds = 0, 0.0
        steps: list[StepFinished] = []
        began = time.perf_counter()
        while self._engine.step():
            ended = time.perf_counter()
            step = self._events[-1]
            if step.decode_tokens == len(chats):
                steps.append(step)
                drawn, seconds = drawn + step.decode_tokens, seconds + ended - began
            began = ended
        self._check()
        if not steps:
            raise NotMeasured("no step had all chats in it; raise --tokens")
        split = {op: statistics.fmean(step.ms_by_op[op] for step in steps) for op in steps[0].ms_by_op}
        return Speed(drawn / seconds, len(chats), split)

    def prefill(self, ids: Sequence[int]) -> Speed:
        self._engine.clear_cache()
        self._submit([(ids, ())], 1)
        began = time.perf_counter()
        while self._engine.step():
            pass
        seconds = time.perf_counter() - began
        self._check()
        return Speed(len(ids) / seconds)

    def _submit(self, chats: Chats, tokens: int) -> None:
        self._events.clear()
        for number, (ids, mix) in enumerate(chats):
            self._engine.submit(Generate(number, TokenIds(tuple(ids)), mix, Sampling(max_tokens=tokens)))
        for request in self._engine.model.scheduler.waiting:
            request.end_tokens = frozenset()

    def _check(self) -> None:
        if failed := next((event for event in self._events if isinstance(event, RequestFailed)), None):
            raise NotMeasured(failed.message)


class ServerSpeeds:
    """A llama-server with a slot for every chat, which are asked for from a thread each; by the times that it tells itself.

    A chat of its own: the tokens after the first by `predicted_ms`; several: see `speed_of`. A prompt: `prompt_ms`.
    """

    def __init__(self, server: LlamaServer) -> None:
        self._server = server

    def decode(self, chats: Chats, tokens: int) -> Speed:
        with ThreadPoolExecutor(len(chats)) as threads:
            return speed_of(list(threads.map(lambda number: self._reply(number, *chats[number], tokens), range(len(chats)))))

    def prefill(self, ids: Sequence[int]) -> Speed:
        times = self._ask(0, ids, (), 1)
        if times["prompt_n"] != len(ids):
            raise NotMeasured(f"llama-server computed {times['prompt_n']} tokens of a prompt of {len(ids)}")
        return Speed(1e3 * len(ids) / times["prompt_ms"])

    def _reply(self, slot: int, ids: Sequence[int], mix: Mix, tokens: int) -> Drawn:
        times = self._ask(slot, ids, mix, tokens)
        last = time.perf_counter()
        return Drawn(last - times["predicted_ms"] / 1e3, last, tokens - 1)

    def _ask(self, slot: int, ids: Sequence[int], mix: Mix, tokens: int) -> dict[str, Any]:
        times = self._server.complete(ids, mix, tokens, slot, cache_prompt=False, ignore_eos=True)["timings"]
        if times["predicted_n"] != tokens:
            raise NotMeasured(f"llama-server ended a reply after {times['predicted_n']} of {tokens} tokens")
        return times


def speed_of(replies: Sequence[Drawn]) -> Speed:
    """The speed of replies that were asked for at once, beside each other or one after the other as they may have been computed.

    Counted are the stretches of time in which as many of them are drawn as ever are (in the middle of one of them), and the tokens of
    those, taken as evenly spread over each reply. So nothing counts that is computed while fewer are drawn (prompts, a reply that begins
    a step late), as no step of the engine does that has not all chats in it.
    """
    def running(moment: float) -> list[Drawn]:
        return [reply for reply in replies if reply.first <= moment <= reply.last]

    at_once = max(len(running((reply.first + reply.last) / 2)) for reply in replies)
    tokens = seconds = 0.0
    for begin, end in pairwise(sorted(moment for reply in replies for moment in (reply.first, reply.last))):
        if end > begin and len(beside := running((begin + end) / 2)) >= at_once:
            seconds += end - begin
            tokens += sum((end - begin) * reply.after_first / (reply.last - reply.first) for reply in beside)
    return Speed(tokens / seconds, at_once)

"""Who holds the conversations of `bench_turns`, and what an answer was."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .bench_errors import NotMeasured
from .protocol import CacheUse, Generate, Mix, RequestFailed, RequestFinished, RequestStarted, Sampling, TokenIds

if TYPE_CHECKING:
    from .bench_server import LlamaServer
    from .engine import Engine


@dataclass(frozen=True, slots=True)
class Answer:
    """The first token of one turn."""

    ms: float
    """from the request to its first token"""
    prompt_tokens: int
    hit_tokens: int
    reply: tuple[int, ...]
    why: str = ""
    """why not more was found, where that is said"""


class Answers(Protocol):
    """Whoever holds a conversation."""

    def forget(self) -> None:
        """Begin with no keys and values stored."""

    def turn(self, ids: Sequence[int], mix: Mix, tokens: int) -> Answer:
        """Reply to `ids` under `mix`, greedily, with up to so many tokens. Raises NotMeasured."""


class OwnAnswers:
    """The engine of this process, alone with one request at a time."""

    def __init__(self, engine: Engine, events: list[Any], reuse: bool) -> None:
        self._engine, self._events, self._reuse = engine, events, reuse

    def forget(self) -> None:
        self._engine.clear_cache()

    def turn(self, ids: Sequence[int], mix: Mix, tokens: int) -> Answer:
        if not self._reuse:
            self.forget()
        self._events.clear()
        self._engine.submit(Generate(1, TokenIds(tuple(ids)), mix, Sampling(max_tokens=tokens)))
        while self._engine.step():
            pass
        if failed := next((event for event in self._events if isinstance(event, RequestFailed)), None):
            raise NotMeasured(failed.message)
        use: CacheUse = next(event.cache for event in self._events if isinstance(event, RequestStarted))
        done = next(event for event in self._events if isinstance(event, RequestFinished))
        why = "; ".join(f"{run.kind}: {run.detail}" if run.detail else run.kind for run in use.missed)
        return Answer(done.stats.ttft_ms, use.prompt_tokens, use.hit_tokens, done.ids, why)


class ServerAnswers:
    """A llama-server, in the first of its slots, by the times that it tells itself."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server

    def forget(self) -> None:
        self._server.forget()

    def turn(self, ids: Sequence[int], mix: Mix, tokens: int) -> Answer:
        told = self._server.complete(ids, mix, tokens, cache_prompt=True, return_tokens=True)
        times = told["timings"]
        return Answer(times["prompt_ms"], len(ids), len(ids) - times["prompt_n"], tuple(told["tokens"]))

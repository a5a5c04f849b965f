"""A base with random adapters in its slots, and requests on it whose steps are run one by one, as the engine runs them."""
from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from ..kernels.attention import copy_block_
from .adapter_store import AdapterStore
from .bench_errors import NotMeasured
from .blocks import BLOCK_TOKENS
from .config import STEP_TOKENS, alone_tokens
from .kv_memory import KvMemory
from .mix import ActiveUse, TokenMix
from .mix_history import MixHistory
from .models.decoder import Decoder
from .page_image import pages_for
from .protocol import Sampling, StepFinished
from .random_base import random_adapter
from .request import Request
from .runner import Runner
from .scheduler import Work
from .stop_text import StopText
from .tokenizer import TextStream
from .vocabulary import Vocabulary

SCALE = 0.7
"""of every adapter"""
MOST_TOKENS = 1 << 20
"""that no request here grows to"""


@dataclass(slots=True)
class Timed:
    """The same work again and again: milliseconds of each by the clock of the host, and its steps."""

    ms: list[float] = field(default_factory=list)
    steps: list[StepFinished] = field(default_factory=list)


class MeasuredBase:
    """`decoder` with an adapter of each of `ranks`, all in slots, `blocks` KV blocks, and graphs for up to `rows` requests.

    Keys and values that no step has computed are random numbers: to read them takes as long.
    """

    def __init__(self, decoder: Decoder, ranks: Sequence[int], rows: int, blocks: int) -> None:
        self.decoder = decoder
        on_device = decoder.device.type == "cuda"
        self._caches = decoder.kv_cache(blocks, BLOCK_TOKENS)
        for cache in self._caches:
            cache.normal_()
        self._memory = KvMemory(blocks, partial(copy_block_, self._caches), _hear_nothing)
        self._step_tokens = alone_tokens(decoder.parameters) if decoder.multiplies_packed else STEP_TOKENS[decoder.device.type]
        pages = sum(map(pages_for, ranks)) if on_device else 0
        self._store = AdapterStore(decoder, max(1, len(ranks)), 1 << 62, _hear_nothing, _NO_TEXT, pages=pages)
        self.names = [self._store.add(random_adapter(decoder.facts, f"adapter {number}", rank, decoder.device, decoder.dtype)).name
                      for number, rank in enumerate(ranks)]
        self._store.acquire(self.names, None, "the measurement")
        self._runner = self._eager_runner()
        if on_device:
            self._runner.use_device_step(rows, _hear_nothing)
        self._runner.warm_up()
        self._numbers, self._draw = count(1), random.Random(0)

    def decode(self, names: Sequence[str], rows: int, context: int, steps: int, seconds: float) -> Timed:
        """Decode steps of `rows` requests, which hold `context` tokens, the new one included, in the first that counts; the two before it
        do not. The adapters `names` act on the rows in turn.

        At most `steps`, and none after so many `seconds`, but one at least. Raises NotMeasured when logits are not finite.
        """
        requests = [self._request(names[row % len(names):][:1] if names else (), context - 2) for row in range(rows)]
        timed = Timed()
        try:
            for request in requests:
                request.commit(request.pending - 1)
            works = [Work(request, 1) for request in requests]
            for _ in range(2):
                self._step(self._runner, works)
            began = time.perf_counter()
            while len(timed.ms) < steps and (not timed.ms or time.perf_counter() - began < seconds):
                ms, step = self._step(self._runner, works)
                timed.ms.append(ms)
                timed.steps.append(step)
        finally:
            self._end(requests)
        return timed

    def prefill(self, names: Sequence[str], tokens: int, times: int, seconds: float) -> Timed:
        """Prompts of `tokens` tokens together, one under each of `names` ("": of the base) or one of the base, in the engine's steps, each
        drawing a token at its end. At most `times`, and none after so many `seconds`, but one at least. `steps` stays empty: see
        `prompt_steps`."""
        timed = Timed()
        began = time.perf_counter()
        while len(timed.ms) < times and (not timed.ms or time.perf_counter() - began < seconds):
            timed.ms.append(sum(ms for ms, _ in self._prompts(self._runner, names, tokens)))
        return timed

    def prompt_steps(self, names: Sequence[str], tokens: int) -> list[StepFinished]:
        """The steps of such prompts, split by op, which takes time itself on a CUDA device."""
        return [step for _, step in self._prompts(self._eager_runner(), names, tokens)]  # the first step of a runner is split

    def _prompts(self, runner: Runner, names: Sequence[str], tokens: int) -> list[tuple[float, StepFinished]]:
        count = max(1, len(names))
        prompts = [self._request([name for name in names[index:index + 1] if name], tokens // count) for index in range(count)]
        try:
            return [self._step(runner, works) for works in _steps(prompts, self._step_tokens)]
        finally:
            self._end(prompts)

    def _eager_runner(self) -> Runner:
        return Runner(self.decoder, self._store, self._caches)

    def _request(self, names: Sequence[str], tokens: int) -> Request:
        """One of random tokens that nobody had before, with blocks for them."""
        uses = tuple(ActiveUse(name, SCALE, 0, self._store.infos[name].digest) for name in names)
        vocab = self.decoder.facts.vocab
        request = Request(
            id=next(self._numbers), ids=[self._draw.randrange(vocab) for _ in range(tokens)], prompt_tokens=tokens - 1,
            history=MixHistory.of(TokenMix((), uses)), sampling=Sampling(), limit=MOST_TOKENS, context=MOST_TOKENS,
            end_tokens=frozenset(), text=TextStream(_NO_TEXT), stops=StopText(()), vocabulary=Vocabulary(_NO_TEXT, vocab, vocab))
        request.begin(self._memory)
        self._reserve(request, tokens)
        return request

    def _step(self, runner: Runner, works: Sequence[Work]) -> tuple[float, StepFinished]:
        began = time.perf_counter()
        drawn, finished = runner.run(works, lambda: None)
        ms = (time.perf_counter() - began) * 1e3
        step = finished()
        for request, token in drawn:
            if token < 0:
                raise NotMeasured("the logits of a step are not finite; take another base or another dtype")
            request.ids.append(token)
            self._reserve(request, 1)
        return ms, step

    def _reserve(self, request: Request, tokens: int) -> None:
        if not request.reserve(tokens):
            raise NotMeasured(f"the {self._memory.blocks} KV blocks of the measurement are too few")

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.end(keep=False)


def _steps(prompts: Sequence[Request], most: int) -> Iterator[list[Work]]:
    """What is left of `prompts`, in steps of at most so many tokens, the first ones first."""
    while any(request.new_tokens < 2 for request in prompts):
        room, works = most, []
        for request in prompts:
            if request.new_tokens < 2 and room:
                works.append(Work(request, min(room, request.pending)))
                room -= works[-1].tokens
        yield works


def _hear_nothing(event: object) -> None:
    """Nobody listens to a measurement."""


class _NoText:
    """The tokenizer of a base whose tokens mean nothing."""

    def encode(self, text: str, special: bool) -> list[int]:
        return []

    def decode(self, ids: Sequence[int], special: bool) -> str:
        return ""


_NO_TEXT: Any = _NoText()

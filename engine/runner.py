"""From planned work to logits: the tensors of the step, the adapters' weights, the forward."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..kernels.sampling import sample, without_foreign
from ..kernels.timing import LapTimer
from .active import Span
from .adapter_store import AdapterStore
from .batch import Chunk, step_inputs
from .device_step import DeviceStep, device_obstacle
from .models.acting import ActiveLora, active_lora
from .models.decoder import Decoder
from .protocol import STEP_OPS, Emit, StepFinished
from .request import Request
from .routing import Routing
from .scheduler import Work
from .warm_up import warm_up


@dataclass(frozen=True, slots=True)
class _Done:
    """What a step has brought, or a part of it."""

    tokens: dict[Request, int]
    routing: Routing | None
    ms: float
    ms_by_op: Callable[[], dict[str, float]]

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self.routing.columns) if self.routing is not None else frozenset()

    @property
    def max_rank(self) -> int:
        return self.routing.max_rank if self.routing is not None else 0


class Runner:
    """Runs steps on one decoder, over the keys and values in `caches` (Decoder.kv_cache)."""

    def __init__(self, decoder: Decoder, store: AdapterStore, caches: Tensor) -> None:
        self.decoder = decoder
        self._store, self._caches = store, caches
        self._device_step: DeviceStep | None = None
        self._why_eager = ""
        self._timer = LapTimer(STEP_OPS, decoder.device)
        self._steps = 0

    @property
    def kv_bytes(self) -> int:
        return self._caches.nbytes

    @property
    def overlaps(self) -> bool:
        """Whether the device may compute a step while other things are done."""
        return self._device_step is not None

    @property
    def graphs(self) -> int:
        """How many are captured."""
        return self._device_step.graphs if self._device_step is not None else 0

    def only_the_step(self) -> None:
        """The next step is not run without its adapters, too."""
        if self._device_step is not None:
            self._device_step.only_the_step()

    def run(
        self, works: Sequence[Work], meanwhile: Callable[[], None],
    ) -> tuple[list[tuple[Request, int]], Callable[[], StepFinished]]:
        """One step. Returns every request that got a token with it (-1: its logits are not finite), and what makes its StepFinished, to be
        called once, in the order of the steps.

        Replies run by themselves where they can as a graph, so that their numbers do not depend on prompts beside them. `meanwhile` is
        called once, beside the device's work where that can be.
        """
        step = self._device_step
        replies = [work for work in works if work.tokens == 1 and work.sampled] if step is not None else []
        why = step.begin([work.request for work in replies]) if replies else ""
        counts = [(work.request.decoding and work.tokens == 1, work.tokens) for work in works]
        if not replies or why:
            meanwhile()
            done = self._run_eagerly(works)
            path = why or self._why_eager or (_prompts(len(works)) if step is not None else "")
            return self._finished(works, counts, (done,), done.ms_by_op, f"eager: {path}" if path else "")
        meanwhile()
        prompts = [work for work in works if work.tokens != 1 or not work.sampled]
        beside = self._run_eagerly(prompts) if prompts else None
        for work in replies:  # known without their tokens
            work.request.commit(1)
        tokens, times = step.end()
        by_op = partial(step.by_op, times)
        done = _Done(dict(zip((work.request for work in replies), tokens, strict=True)), step.routing, times.ms, by_op)
        if beside is None:
            return self._finished(works, counts, (done,), by_op, "graph")
        return self._finished(works, counts, (done, beside), partial(_both, done, beside), f"graph and {_prompts(len(prompts))}")

    def _run_eagerly(self, works: Sequence[Work]) -> _Done:
        self._timer.start()
        logits, lora = self._forward(works)
        sampled = [work.request for work in works if work.sampled]
        tokens = sample(logits, [request.draw(self.decoder.device) for request in sampled]) if sampled else []
        self._timer.lap("sampling")
        for work in works:
            work.request.commit(work.tokens)
        ms, by_op = self._timer.finish()
        return _Done(dict(zip(sampled, tokens, strict=True)), lora.routing if lora else None, ms, lambda: by_op)

    def _finished(
        self, works: Sequence[Work], counts: Sequence[tuple[bool, int]], parts: tuple[_Done, ...], by_op: Callable[[], dict[str, float]],
        path: str,
    ) -> tuple[list[tuple[Request, int]], Callable[[], StepFinished]]:
        """`counts`: whether each of `works` continues a reply, and its tokens. `parts`, the first of which ended last."""
        self._steps += 1
        number = self._steps

        def finished() -> StepFinished:
            decoding = sum(decodes for decodes, _ in counts)
            return StepFinished(
                step=number, prefill_tokens=sum(tokens for _, tokens in counts) - decoding, decode_tokens=decoding,
                requests=len(counts), adapters=len(frozenset().union(*(part.adapters for part in parts))),
                max_rank=max(part.max_rank for part in parts), ms=parts[0].ms, ms_by_op=by_op(), path=path)

        tokens = parts[0].tokens if len(parts) == 1 else parts[0].tokens | parts[1].tokens
        return [(work.request, tokens[work.request]) for work in works if work.request in tokens], finished

    def use_device_step(self, max_running: int, emit: Emit) -> None:
        """Run what can be by launches that wait for nothing, up to `max_running` requests; under graphs on a CUDA device."""
        self._why_eager = device_obstacle(self.decoder)
        if not self._why_eager:
            self._device_step = DeviceStep(self.decoder, self._store, self._caches, max_running, emit)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """So that the first request does not pay for what torch and Triton prepare once; see `warm_up`."""
        warm_up(self.decoder, self._caches, self._store.rehearsal(), progress)
        if self._device_step is not None:
            self._device_step.warm_up()

    def logits(self, works: Sequence[Work], every: bool = False) -> Tensor:
        """The logits [sampled works, vocab] fp32 of one step, nothing drawn.

        With `every` those of all its tokens, in the order of `works`.
        """
        self._timer.start()
        logits, _ = self._forward(works, every)
        rows = [work.request.vocabulary.head_rows for work in works for _ in range(work.tokens if every else work.sampled)]
        for work in works:
            work.request.commit(work.tokens)
        return without_foreign(logits.float(), rows)

    def _forward(self, works: Sequence[Work], every: bool = False) -> tuple[Tensor, ActiveLora | None]:
        inputs = step_inputs([self._chunk(work, every) for work in works], self.decoder.device)
        lora = self._lora(works, every)
        return self.decoder.forward(inputs, self._caches, lora, self._timer.lap), lora

    def _lora(self, works: Sequence[Work], every: bool) -> ActiveLora | None:
        """None when no adapter acts on any token of the step: the base path then runs bit for bit."""
        spans = [Span(*piece) for work in works for piece in work.request.history.pieces(work.request.stored, work.tokens)]
        acting = {use.name: use.digest for span in spans for use in span.mix.active if use.start < span.position + span.count}
        if not acting:
            return None
        self._store.check_holds(acting)
        ends = [Span(work.request.mix, work.request.stored + work.tokens - 1, 1) for work in works if work.sampled]
        return active_lora(self._store.routing(acting), spans, spans if every else ends)

    def _chunk(self, work: Work, every: bool) -> Chunk:
        request = work.request
        assert request.table is not None  # the scheduler plans running requests only
        ids = request.ids[request.stored : request.stored + work.tokens]
        return Chunk(ids, request.stored, request.table, work.sampled, every, self.decoder.rope.start(len(request.ids)))


def _both(replies: _Done, prompts: _Done) -> dict[str, float]:
    """Milliseconds by op of a step of both: `replies` waited for `prompts` too."""
    busy = sum(ms for op, ms in replies.ms_by_op().items() if op != "gaps")
    share = (replies.ms - busy) / max(prompts.ms, 1e-9)
    return {op: ms * share for op, ms in prompts.ms_by_op().items()} | {"replies": busy}


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count} prompts"

"""From planned work to logits: the tensors of the step, the adapters' weights, the forward."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..kernels.sampling import sample, without_foreign
from ..kernels.timing import LapTimer
from .active import Span
from .adapter_store import AdapterStore
from .batch import Chunk, step_inputs
from .blocks import BlockTable
from .device_step import DeviceStep, device_obstacle
from .models.acting import ActiveLora, active_lora
from .models.decoder import Decoder
from .protocol import STEP_OPS, Emit, StepFinished
from .request import Request
from .routing import Routing
from .scheduler import Work


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

    def run(self, works: Sequence[Work], meanwhile: Callable[[], None]) -> tuple[list[tuple[Request, int]], StepFinished]:
        """One step. Returns every request that got a token with it (-1: its logits are not finite), and the step's times.

        `meanwhile` is called once, beside the device's work where that can be.
        """
        step, why = self._device_step, self._why_eager
        if step is not None and not (why := step.begin(works)):
            return self._run_on_device(works, step, meanwhile)
        meanwhile()
        self._timer.start()
        logits, lora = self._forward(works)
        sampled = [work.request for work in works if work.sampled]
        tokens = sample(logits, [request.draw(self.decoder.device) for request in sampled]) if sampled else []
        self._timer.lap("sampling")
        for work in works:
            work.request.commit(work.tokens)
        finished = self._finished(works, lora.routing if lora else None, *self._timer.finish(), path=f"eager: {why}" if why else "")
        return list(zip(sampled, tokens, strict=True)), finished

    def _run_on_device(
        self, works: Sequence[Work], step: DeviceStep, meanwhile: Callable[[], None],
    ) -> tuple[list[tuple[Request, int]], StepFinished]:
        """The rest of a step that was launched; what can be known without its tokens is done before they are there."""
        meanwhile()
        for work in works:
            work.request.commit(1)
        tokens, ms, by_op = step.end()
        finished = self._finished(works, step.routing, ms, by_op, path="graph")
        return [(work.request, token) for work, token in zip(works, tokens, strict=True)], finished

    def _finished(self, works: Sequence[Work], routing: Routing | None, ms: float, by_op: dict[str, float], path: str) -> StepFinished:
        self._steps += 1
        decoding = sum(work.request.decoding and work.tokens == 1 for work in works)
        return StepFinished(
            step=self._steps, prefill_tokens=sum(work.tokens for work in works) - decoding, decode_tokens=decoding,
            requests=len(works), adapters=len(routing.columns) if routing else 0, max_rank=routing.max_rank if routing else 0,
            ms=ms, ms_by_op=by_op, path=path)

    def use_device_step(self, max_running: int, emit: Emit) -> None:
        """Run what can be by launches that wait for nothing, up to `max_running` requests; under graphs on a CUDA device."""
        self._why_eager = device_obstacle(self.decoder)
        if not self._why_eager:
            self._device_step = DeviceStep(self.decoder, self._store, self._caches, max_running, emit)

    def warm_up(self) -> None:
        """One token through the decoder, so that the first request does not pay for what torch and Triton prepare once."""
        chunk = Chunk((0,), 0, BlockTable([0]), True)
        self._timer.start()
        self.decoder.forward(step_inputs([chunk], self.decoder.device), self._caches, None, self._timer.lap)
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

"""The engine: one base, its adapters, its requests. Methods raise sentences; what happens is told by events."""
from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec
import psutil
from torch import Tensor

from .adapter_read import ReadAdapter
from .checks import Checks
from .failures import not_finite, out_of_memory, sentence
from .loaded import LoadedModel, load_model
from .look import look
from .mixes import Mixes
from .new_request import asked_request, new_request
from .outbox import Outbox
from .protocol import (
    AdapterInfo,
    CheckpointAppeared,
    Emit,
    EngineSnapshot,
    Generate,
    GenerateTogether,
    LoadModel,
    Mix,
    MixChange,
    ModelInfo,
    ModelLoaded,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Sampling,
    SetMix,
    TextDelta,
)
from .request import Reason, Request
from .scheduler import GroupRefused, Scheduler
from .scores import Scores
from .traces import Traces
from .waiting import tell_waiting
from .watch import Look, Watched

NO_MODEL = "no base is loaded; load a model first"


class DuplicateRequest(ValueError):
    """A request with the number of one that has not ended; that one goes on."""


class Engine:
    """Everything of one engine; several may live in one process. Not thread-safe: one thread owns it."""

    def __init__(self, emit: Emit, wake: Callable[[], None] | None = None) -> None:
        """With `wake` adapters that lie on disk only are read in a thread, which calls it when a step has something new to look at; who
        needs one waits and the others go on. Without it the step that needs one reads it."""
        self._emit, self._wake = Outbox(emit), wake
        self._model: LoadedModel | None = None
        self._mixes: Mixes | None = None
        self._requests: dict[int, Request] = {}
        self._process = psutil.Process()
        self.checks = Checks(self, self._emit, wake)
        self.scores = Scores(self, self._emit)
        self._traces = Traces(self._emit)

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise ValueError(NO_MODEL)
        return self._model

    @property
    def mixes(self) -> Mixes:
        """Those of the base that is loaded."""
        if self._mixes is None:
            raise ValueError(NO_MODEL)
        return self._mixes

    @property
    def request_ids(self) -> Collection[int]:
        """Of the requests that have not ended."""
        return self._requests.keys()

    @property
    def busy(self) -> bool:
        """Whether a step would compute something."""
        return self._model is not None and bool(self._model.scheduler.running)

    # -- base ------------------------------------------------------------------------------------
    def load_model(self, command: LoadModel, cancelled: Callable[[], bool] = lambda: False) -> ModelInfo:
        """Load a base; the one before, its adapters and its requests go when the new one is ready. See `loaded.load_model`."""
        started = time.perf_counter()
        loaded = load_model(command, self._emit, cancelled, lambda: self._drop_model("to make room for the next base"), self._wake)
        self._drop_model("another base was loaded")
        self._model, self._mixes = loaded, Mixes(loaded, self._requests, self._fail, self._emit)
        self._emit(ModelLoaded(loaded.info, (time.perf_counter() - started) * 1e3))
        return loaded.info

    def _drop_model(self, because: str) -> None:
        if self._model is None:
            return
        self.checks.drop(f"the base was unloaded: {because}")
        self.scores.drop(f"the base was unloaded: {because}")
        self._traces.drop(f"the base was unloaded: {because}")
        self.drop_requests(f"the base was unloaded: {because}")
        self.mixes.drop(f"the base was unloaded: {because}")
        self._model.store.clear()
        self._model = self._mixes = None

    # -- adapters --------------------------------------------------------------------------------
    @property
    def adapter_names(self) -> frozenset[str]:
        """Of what is loaded; none without a base."""
        return frozenset(self._model.store.infos) if self._model is not None else frozenset()

    def load_adapter(self, path: str, name: str | None = None) -> AdapterInfo:
        return self.model.store.load(path, name)

    def reload_adapter(self, name: str) -> None:
        """Read the file of `name` again, now; what is loaded stays when that cannot be taken."""
        store = self.model.store
        self.replace_adapter(name, store.read(store.path(name), name))

    def replace_adapter(self, name: str, read: ReadAdapter) -> None:
        """Put what was read under `name`: for new and waiting requests and the standing mix; running ones finish on what they have."""
        swap = self.model.store.replace(name, read)
        for request in (*self._requests.values(), *self.scores.requests):
            if request.id in swap.users:
                request.history = request.history.renamed(name, swap.kept_as)
        self.mixes.reloaded(name)

    def watched(self) -> tuple[Watched, ...]:
        """The files of the adapters that are loaded, for a look at them."""
        return self._model.store.watched() if self._model is not None else ()

    def files_seen(self, found: Look) -> None:
        """Tell what a look found that is news."""
        if self._model is not None:
            for watched, state in found.states:
                self._model.store.file_seen(watched, state)
            for name, path in found.checkpoints:
                self._emit(CheckpointAppeared(name, str(path)))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its memory is freed when the last request that uses it or waits for it ends."""
        self.model.store.unload(name)
        self.mixes.unloaded(name)

    def pin_adapter(self, name: str, pinned: bool) -> None:
        self.model.store.pin(name, pinned)

    def set_invocation(self, name: str, text: str, in_reply: bool = False) -> None:
        self.model.store.set_invocation(name, text, in_reply)

    def clear_cache(self) -> None:
        """Forget the KV blocks that no running request holds."""
        self.model.memory.clear("it was asked for")

    def trace(self) -> None:
        """Record the next step under the profiler; told by StepTraced or TraceFailed. Raises ValueError when no base is loaded."""
        self.model  # noqa: B018 - raises without one
        self._traces.ask()

    # -- requests --------------------------------------------------------------------------------
    def submit(self, command: Generate) -> None:
        """Queue a request. Raises ValueError when it can never run; it is not queued then."""
        self.submit_together(GenerateTogether((command,)))

    def submit_together(self, command: GenerateTogether) -> None:
        """Queue requests that run together. Raises ValueError when one of them can never run, or all together; none is queued then."""
        model = self.model
        requests: list[Request] = []
        for one in command.requests:
            if one.request_id in self._requests or any(request.id == one.request_id for request in requests):
                raise DuplicateRequest(f"request {one.request_id} is running already; give every request its own number")
            requests.append(asked_request(model, one))
        if not requests:
            raise ValueError("no request was given to run together with others; give one or more")
        model.scheduler.check_fits(requests)
        try:
            for request in requests:
                model.store.expect(request.id, request.mix.names)
        except ValueError:
            for request in requests:
                model.store.release(request.id)
            raise
        model.scheduler.add(*requests)
        self._requests |= {request.id: request for request in requests}

    def abort(self, request_id: int) -> None:
        """End a request now; nothing happens when it has ended already."""
        if request_id in self._requests:
            self._finish(self._requests[request_id], "aborted")

    def set_mix(self, mix: Mix, request_ids: Sequence[int] = (), change: MixChange = "splice") -> None:
        """The standing mix, and that of requests from their next token on (see SetMix for `change`); later, while an adapter of it is read.

        Raises ValueError and changes nothing when refused; one that is refused later is told by MixRefused.
        """
        self.mixes.set(SetMix(mix, tuple(request_ids), change))

    def drop_requests(self, message: str, out_of_memory: bool = False) -> None:
        """Fail every request, running or waiting."""
        for request in list(self._requests.values()):
            self._fail(request, message, out_of_memory)

    # -- the step --------------------------------------------------------------------------------
    def step(self, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Admit, compute one step, tell. False when there was nothing to do. `meanwhile` is called beside the device's work, where there is
        any: what it does then delays no token."""
        if self._model is None:
            return False
        self._admit(self._model)
        works = self._model.scheduler.plan()
        stopped = self._tell_stopped(self._model.scheduler)

        def beside() -> None:
            self._emit.flush()
            meanwhile()

        if not works:
            beside()
            return stopped
        drawn, told = self._traces.run(self._model.runner, works, beside)
        for request, token in drawn:
            self._accept(request, token)
        for make in told:
            self._emit.later(make)
        if not (self._model.runner.overlaps and self.busy):
            self._emit.flush()
        return True

    def _tell_stopped(self, scheduler: Scheduler) -> bool:
        """Whom the plan could not give blocks."""
        for preempted in scheduler.preempted:
            self._model.memory.count_preemption()
            self._emit(RequestPreempted(preempted.request.id, preempted.because, preempted.tokens))
        for full in scheduler.full:
            self._finish(full.request, "memory", full.because)
        return bool(scheduler.preempted or scheduler.full)

    def logits(self, ids: Sequence[int], mix: Mix = ()) -> Tensor:
        """[vocab] fp32 at the last of `ids`, computed alone and in steps of the usual size; with the tokens that `mix` adds, if any."""
        return self.batch_logits([(ids, mix)])[0]

    def batch_logits(self, prompts: Sequence[tuple[Sequence[int], Mix]]) -> list[Tensor]:
        """[vocab] fp32 at the last token of every prompt, given as ids and mix, all computed in the same steps.

        Raises ValueError when one of them could not be a request, or all together want more slots or KV blocks than there are.
        """
        model = self.model
        requests = [self.make_request(-1 - i, list(ids), mix, Sampling(max_tokens=1)) for i, (ids, mix) in enumerate(prompts)]
        found: dict[int, Tensor] = {}
        with look(model, requests, "a look at the logits", None) as scheduler:
            while works := scheduler.plan():
                last = [work.request.id for work in works if work.sampled]
                found |= zip(last, model.runner.logits(works), strict=True)
        return [found[request.id][: request.vocabulary.head_rows] for request in requests]

    def make_request(self, request_id: int, ids: list[int], mix: Mix, sampling: Sampling) -> Request:
        """A request of this model, not queued. Raises ValueError when it could never run."""
        return new_request(self.model, request_id, ids, mix, sampling)

    def _admit(self, model: LoadedModel) -> None:
        """Let run who can, tell the others, and bring nearer what they wait for."""
        model.store.settle()
        self.mixes.go_on()
        self._begin(model)
        model.store.want([*self.mixes.wanted(), *model.slots.wanted(model.scheduler.queue), *self.scores.wanted(),
                          *self.checks.wanted()])

    def _begin(self, model: LoadedModel) -> None:
        while model.scheduler.queue:
            try:
                begun, because = model.scheduler.next_admitted(model.slots)
            except GroupRefused as refused:  # the others go on
                for request in list(refused.group.requests):
                    self._fail(request, sentence(refused.cause), out_of_memory(refused.cause))
                continue
            if not begun:
                tell_waiting(model.scheduler.queue, because, model.slots.reading, self._emit)
                return
            for request, use in begun:
                if request.remark:
                    use = msgspec.structs.replace(use, remark=request.remark)
                    request.remark = ""
                self._emit(RequestStarted(request.id, request.prompt_tokens, request.mix.activations, use))

    def _accept(self, request: Request, token: int) -> None:
        if token < 0:
            self._fail(request, not_finite(f"token {len(request.ids)}", request.mix.mix, self.model.info.dtype))
            return
        self.model.slots.caught_up(request)
        text, reason = request.accept(token)
        if text or reason is None:
            self._emit.later(partial(TextDelta, request.id, text, request.new_tokens))
        if reason is not None:
            self._finish(request, reason)
        elif (written := request.written()) is not None:
            self.mixes.fire(request, written)

    def _finish(self, request: Request, reason: Reason, detail: str = "") -> None:
        self._forget(request)
        self._emit(RequestFinished(request.id, reason, request.stats(), tuple(request.ids[request.prompt_tokens :]), detail))

    def _fail(self, request: Request, message: str, out_of_memory: bool = False) -> None:
        self._forget(request, keep=False)
        self._emit(RequestFailed(request.id, message, out_of_memory))

    def _forget(self, request: Request, keep: bool = True) -> None:
        self.model.scheduler.remove(request, keep)
        self.model.store.release(request.id)
        del self._requests[request.id]

    # -- what is ---------------------------------------------------------------------------------
    def snapshot(self) -> EngineSnapshot:
        self._emit.flush()
        memory = self._process.memory_info().rss
        model = self._model
        if model is None:
            return EngineSnapshot(memory_bytes=memory)
        running, store = model.scheduler.running, model.store
        kv = model.memory.view(((request.id, request.mix.mix) for request in running), model.runner.kv_bytes)
        return EngineSnapshot(
            model=model.info, adapters=store.adapter_views(), slots=store.slot_views(), pages=store.page_views(), host=store.host_view(),
            kv=kv, mix=self.mixes.standing, running=tuple(request.id for request in running),
            waiting=tuple(request.id for request in model.scheduler.waiting), memory_bytes=memory, composed_bytes=store.composed_bytes)

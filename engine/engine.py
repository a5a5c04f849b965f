"""The engine: one base, its adapters, its requests. Methods raise sentences; what happens is told by events."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import psutil
from torch import Tensor

from .adapter_read import ReadAdapter
from .blocks import BLOCK_TOKENS
from .chat import check_length, prompt_ids
from .checks import Checks
from .failures import out_of_memory, sentence
from .loaded import LoadedModel, load_model
from .look import look
from .mix import MixError, TokenMix, check_mix, resolve_mix
from .protocol import (
    AdapterInfo,
    CheckpointAppeared,
    CommandFailed,
    Emit,
    EngineSnapshot,
    Generate,
    KvOwner,
    KvView,
    LoadModel,
    Mix,
    MixSet,
    ModelInfo,
    ModelLoaded,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    RequestStarted,
    Sampling,
    TextDelta,
)
from .request import Reason, Request, check_sampling
from .scores import Scores
from .slot_pool import SlotsBusy
from .stop_text import StopText
from .tokenizer import TextStream
from .vocabulary import Vocabulary
from .watch import Look, Watched


class DuplicateRequest(ValueError):
    """A request with the number of one that has not ended; that one goes on."""


class Engine:
    """Everything of one engine; several may live in one process. Not thread-safe: one thread owns it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._model: LoadedModel | None = None
        self._requests: dict[int, Request] = {}
        self._mix: Mix = ()
        self._process = psutil.Process()
        self.checks = Checks(self, emit)
        self.scores = Scores(self, emit)

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise ValueError("no base is loaded; load a model first")
        return self._model

    @property
    def busy(self) -> bool:
        """Whether a step would compute something."""
        return self._model is not None and bool(self._model.scheduler.running)

    # -- base ------------------------------------------------------------------------------------
    def load_model(self, command: LoadModel, cancelled: Callable[[], bool] = lambda: False) -> ModelInfo:
        """Load a base; the one before, its adapters and its requests go when the new one is ready. See `loaded.load_model`."""
        started = time.perf_counter()
        loaded = load_model(command, self._emit, cancelled, lambda: self._drop_model("to make room for the next base"))
        self._drop_model("another base was loaded")
        self._model = loaded
        self._emit(ModelLoaded(loaded.info, (time.perf_counter() - started) * 1e3))
        return loaded.info

    def _drop_model(self, because: str) -> None:
        if self._model is None:
            return
        self.checks.drop(f"the base was unloaded: {because}")
        self.scores.drop(f"the base was unloaded: {because}")
        self.drop_requests(f"the base was unloaded: {because}")
        self._model.store.clear()
        self._model, self._mix = None, ()

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
        model = self.model
        swap = model.store.replace(name, read)
        for request in (*model.scheduler.running, *self.scores.requests):
            if request.id in swap.users:
                request.mix = request.mix.renamed(name, swap.kept_as)
        for request in [request for request in model.scheduler.waiting if any(use.name == name for use in request.mix.mix)]:
            with self._failing(lambda message, memory, request=request: self._fail(request, message, memory)):
                self._swap_mix(request, self._token_mix(request.mix.mix, request.ids, request.id))
        if any(use.name == name for use in self._mix):
            with self._failing(lambda message, _: self._emit(CommandFailed(
                    f"adapter {name!r} was reloaded, but has no slot for the mix that is set: {message}"))):
                self._give_slots(self._mix)

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
        self._mix = tuple(use for use in self._mix if use.name != name)

    def pin_adapter(self, name: str, pinned: bool) -> None:
        self.model.store.pin(name, pinned)

    def set_invocation(self, name: str, text: str) -> None:
        self.model.store.set_invocation(name, text)

    # -- requests --------------------------------------------------------------------------------
    def submit(self, command: Generate) -> None:
        """Queue a request. Raises ValueError when it can never run; it is not queued then."""
        model = self.model
        if command.request_id in self._requests:
            raise DuplicateRequest(f"request {command.request_id} is running already; give every request its own number")
        check_sampling(command.sampling)
        check_length(command.prompt, model.config.context)
        check_mix(command.mix, model.store.infos)
        tokenizer = model.store.vocabulary(command.mix, command.request_id).tokenizer
        ids, _ = prompt_ids(tokenizer, model.base.chat_template, command.prompt)
        request = self.make_request(command.request_id, list(ids), command.mix, command.sampling)
        model.scheduler.check_fits(request)
        model.store.expect(request.id, request.mix.names)
        model.scheduler.add(request)
        self._requests[request.id] = request

    def abort(self, request_id: int) -> None:
        """End a request now; nothing happens when it has ended already."""
        if request_id in self._requests:
            self._finish(self._requests[request_id], "aborted")

    def set_mix(self, mix: Mix, request_ids: Sequence[int] = ()) -> None:
        """The standing mix, and that of running requests from their next token on. Raises ValueError and changes nothing when refused."""
        store = self.model.store
        check_mix(mix, store.infos)
        store.vocabulary(mix, None)
        requests = [self._requests[i] for i in request_ids if i in self._requests]
        changed = [request for request in requests if request.mix.mix != mix]
        if mix == self._mix and not changed:
            return
        self._give_slots(mix)
        done: list[tuple[Request, TokenMix]] = []
        try:
            for request in changed:
                before = request.mix
                self._swap_mix(request, self._token_mix(mix, request.ids[: request.prompt_tokens], request.id))
                done.append((request, before))
        except Exception:
            for request, before in reversed(done):
                self._swap_back(request, before)
            raise
        self._mix = mix
        activations = {request.id: request.mix.activations for request in changed if request.mix.activations}
        self._emit(MixSet(mix, {request.id: request.new_tokens for request in requests}, activations))

    def drop_requests(self, message: str, out_of_memory: bool = False) -> None:
        """Fail every request, running or waiting."""
        for request in list(self._requests.values()):
            self._fail(request, message, out_of_memory)

    # -- the step --------------------------------------------------------------------------------
    def step(self) -> bool:
        """Admit, compute one step, tell. False when there was nothing to compute."""
        if self._model is None:
            return False
        self._admit(self._model)
        works = self._model.scheduler.plan()
        if not works:
            return False
        drawn, finished = self._model.runner.run(works)
        for request, token in drawn:
            self._accept(request, token)
        self._emit(finished)
        return True

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
        with look(model, requests, "a look at the logits") as scheduler:
            while works := scheduler.plan():
                last = [work.request.id for work in works if work.sampled]
                found |= zip(last, model.runner.logits(works), strict=True)
        return [found[request.id][: request.vocabulary.head_rows] for request in requests]

    def make_request(self, request_id: int, ids: list[int], mix: Mix, sampling: Sampling) -> Request:
        """A request of this model, not queued. Raises ValueError when it could never run."""
        model = self.model
        context = model.config.context
        if not ids:
            raise ValueError("the prompt is empty; a reply needs at least one token to follow")
        if len(ids) >= context:
            raise ValueError(f"the prompt is {len(ids)} tokens long, too long for the context of {context} tokens with room for a reply; "
                             "shorten it or load the model with a larger context")
        check_mix(mix, model.store.infos)
        vocabulary = model.store.vocabulary(mix, request_id)
        outside = next((i for i in ids if not 0 <= i < vocabulary.rows), None)
        if outside is not None:
            raise ValueError(f"token id {outside} is not in the vocabulary of {vocabulary.rows} tokens")
        return Request(
            request_id, ids, len(ids), self._token_mix(mix, ids, request_id), sampling, min(len(ids) + sampling.max_tokens, context),
            context, self._end_tokens(vocabulary), TextStream(vocabulary.tokenizer), StopText(sampling.stop), vocabulary)

    def _end_tokens(self, vocabulary: Vocabulary) -> frozenset[int]:
        return frozenset((*self.model.base.end_tokens, *vocabulary.end_tokens))

    def _token_mix(self, mix: Mix, prompt: Sequence[int], request_id: int) -> TokenMix:
        store = self.model.store
        return resolve_mix(mix, prompt, store.infos_for(request_id), store.text)

    def _admit(self, model: LoadedModel) -> None:
        def acquire(request: Request) -> str:
            try:
                model.store.acquire(request.mix.names, request.id, f"request {request.id}")
            except SlotsBusy as busy:
                return str(busy)
            return ""

        while model.scheduler.waiting:
            oldest = model.scheduler.waiting[0]
            try:
                request, because = model.scheduler.next_admitted(acquire)
            except Exception as error:  # the adapters of this request cannot be had; the others go on
                if not isinstance(error, (ValueError, OSError)) and not out_of_memory(error):
                    raise
                self._fail(oldest, sentence(error), out_of_memory(error))
                continue
            if request is None:
                self._tell_waiting(model.scheduler.waiting, because)
                return
            self._emit(RequestStarted(request.id, request.prompt_tokens, request.mix.activations))

    def _tell_waiting(self, waiting: Sequence[Request], because: str) -> None:
        """What the oldest waits for, when that changed; and once for each other that it is not its turn."""
        for place, request in enumerate(waiting):
            reason = f"its turn comes after request {waiting[0].id}" if place else because
            if request.waits_for != reason and not (place and request.waits_for):
                request.waits_for = reason
                self._emit(RequestQueued(request.id, reason))

    @contextlib.contextmanager
    def _failing(self, tell: Callable[[str, bool], object]) -> Iterator[None]:
        """What cannot be had is told in words, with whether memory ran out; anything else is a fault and passes."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, (ValueError, OSError)) and not out_of_memory(error):
                raise
            tell(sentence(error), out_of_memory(error))

    def _give_slots(self, mix: Mix) -> None:
        """Slots for the standing mix at once; when requests hold them all, it gets them with its first request."""
        with contextlib.suppress(SlotsBusy):
            self.model.store.acquire([use.name for use in mix if use.scale != 0], None, "the mix that was set")

    def _swap_mix(self, request: Request, mix: TokenMix) -> None:
        """Raises ValueError when a running request cannot have the slots of `mix`, or its words; it keeps what it had then."""
        vocabulary = self.model.store.vocabulary(mix.mix, request.id)
        lost = vocabulary.lost(request.ids, request.vocabulary)
        if lost is not None:
            raise MixError(f"request {request.id} holds the token {lost}, {request.vocabulary.tokenizer.token_text([lost])[0]!r}, that "
                           "only an adapter of its old mix has; keep that adapter in the mix until the reply ends")
        if request.table is not None:
            self.model.store.acquire(mix.names, request.id, f"request {request.id}, whose mix was changed")
        else:
            self.model.store.expect(request.id, mix.names)
        request.mix, request.vocabulary, request.end_tokens = mix, vocabulary, self._end_tokens(vocabulary)
        request.text.tokenizer = vocabulary.tokenizer

    def _swap_back(self, request: Request, before: TokenMix) -> None:
        """After a refusal: the mix that `request` had. When its adapters are gone meanwhile, the request fails, in words."""
        try:
            self._swap_mix(request, before)
        except Exception as error:
            self._fail(request, f"its mix was changed, that was refused, and its own cannot be had any more: {sentence(error)}",
                       out_of_memory(error))

    def _accept(self, request: Request, token: int) -> None:
        if token < 0:
            self._fail(request, f"the model computed numbers that are not finite at token {len(request.ids)} {self._advice(request)}")
            return
        text, reason = request.accept(token)
        if text or reason is None:
            self._emit(TextDelta(request.id, text, request.new_tokens))
        if reason is not None:
            self._finish(request, reason)

    def _advice(self, request: Request) -> str:
        if uses := [f"{use.name} x {use.scale:g}" for use in request.mix.mix if use.scale != 0]:
            return f"(mix: {', '.join(uses)}); lower the scales"
        wider = "load it with --dtype fp32, or get" if self.model.info.dtype != "fp32" else "get"
        return f"with no adapter in its mix: that is the base's own doing; {wider} another copy of the base"

    def _finish(self, request: Request, reason: Reason) -> None:
        self._forget(request)
        self._emit(RequestFinished(request.id, reason, request.stats(), tuple(request.ids[request.prompt_tokens :])))

    def _fail(self, request: Request, message: str, out_of_memory: bool = False) -> None:
        self._forget(request)
        self._emit(RequestFailed(request.id, message, out_of_memory))

    def _forget(self, request: Request) -> None:
        self.model.store.release(request.id)
        self.model.scheduler.remove(request)
        del self._requests[request.id]

    # -- what is ---------------------------------------------------------------------------------
    def snapshot(self) -> EngineSnapshot:
        memory = self._process.memory_info().rss
        model = self._model
        if model is None:
            return EngineSnapshot(memory_bytes=memory)
        running, store = model.scheduler.running, model.store
        owners = tuple(_owners(running))
        kv = KvView(BLOCK_TOKENS, model.config.blocks, model.runner.kv_bytes, sum(owner.blocks for owner in owners), owners=owners)
        return EngineSnapshot(
            model=model.info, adapters=store.adapter_views(), slots=store.slot_views(), host=store.host_view(), kv=kv, mix=self._mix,
            running=tuple(request.id for request in running), waiting=tuple(request.id for request in model.scheduler.waiting),
            memory_bytes=memory, composed_bytes=store.composed_bytes)


def _owners(running: Iterable[Request]) -> Iterable[KvOwner]:
    for request in running:
        if request.table is not None:
            yield KvOwner(request.id, len(request.table.blocks), request.stored, request.mix.mix)

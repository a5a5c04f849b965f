"""The mixes of one base: the standing one, and those of requests that wait or run, as they are changed."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from .failures import out_of_memory, refusal, sentence
from .fetches import Want
from .late_mixes import LateMixes, acting
from .live_mix import carry_out, changed_history, compute_again, mix_change, token_mix
from .loaded import LoadedModel
from .mix import Awaited, activation_at, check_mix
from .mix_history import MixHistory
from .protocol import CommandFailed, Emit, InvocationFired, Mix, MixSet, SetMix
from .request import Request
from .slot_pool import SlotsBusy

Fail = Callable[[Request, str, bool], object]
"""of (request, why, whether memory ran out)"""


class Mixes:
    """Emits MixSet, MixRefused and InvocationFired; `fail` ends a request whose mix cannot be had any more."""

    def __init__(self, model: LoadedModel, requests: Mapping[int, Request], fail: Fail, emit: Emit) -> None:
        """`requests`: those that have not ended, by number, as they come and go."""
        self.standing: Mix = ()
        self._model, self._requests, self._fail, self._emit = model, requests, fail, emit
        self._late = LateMixes(self._change, emit)

    def set(self, command: SetMix) -> None:
        """Carry out `command`, or hold it back while an adapter of its mix is read; one that is refused then is told by MixRefused.

        Raises ValueError and changes nothing when it is refused now.
        """
        store = self._model.store
        check_mix(command.mix, store.infos)
        store.vocabulary(command.mix, None)
        if not self._late.holds_back(command, store):
            self._change(command)

    def go_on(self) -> None:
        """Carry out what was held back and waits no more."""
        self._late.go_on(self._model.store)

    def wanted(self) -> Iterator[Want]:
        """The adapters that are waited for."""
        return self._late.wanted()

    def drop(self, because: str) -> None:
        """Refuse what is held back, told with the cause."""
        self._late.drop(because)

    def unloaded(self, name: str) -> None:
        """The standing mix goes on without `name`."""
        self.standing = tuple(use for use in self.standing if use.name != name)

    def reloaded(self, name: str) -> None:
        """What `name` means now is for requests that wait and have not begun, and for the standing mix."""
        for request in self._model.scheduler.waiting:
            if not request.started and any(use.name == name for use in request.mix.mix):
                there = tuple(use for use in request.mix.mix if use.name in self._model.store.infos)  # what was off may be unloaded
                with self._failing(lambda message, memory, request=request: self._fail(request, message, memory)):
                    carry_out(self._model, [mix_change(self._model, request, MixHistory.of(token_mix(self._model, there, request)))])
        if any(use.name == name for use in self.standing):
            with self._failing(lambda message, _: self._emit(CommandFailed(
                    f"adapter {name!r} was reloaded, but has no slot for the mix that is set: {message}"))):
                self._give_slots(self.standing)

    def fire(self, request: Request, written: Awaited) -> None:
        """An aLoRA acts from the invocation on that the reply has just written; it is computed again under it."""
        store, history = self._model.store, request.history
        activation = activation_at(written.info, request.ids, len(request.ids) - len(written.info.invocation_tokens), store.text)
        request.rewind(max(activation.start, history.parts[-1].start))
        request.history = history.replaced(history.mix.fired(written, activation))
        self._emit(InvocationFired(request.id, activation, request.new_tokens))

    def _change(self, command: SetMix) -> None:
        model, mix, change = self._model, command.mix, command.change
        check_mix(mix, model.store.infos)
        model.store.vocabulary(mix, None)
        requests = [self._requests[i] for i in command.request_ids if i in self._requests] if change != "finish" else []
        changed = [request for request in requests if request.mix.mix != mix]
        if mix == self.standing and not changed:
            return
        changes = [mix_change(model, request, changed_history(request, token_mix(model, mix, request), change == "recompute"))
                   for request in changed]
        self._give_slots(mix)
        carry_out(model, changes)
        self.standing = mix
        recomputed = {request.id: tokens for request in changed if change == "recompute" and (tokens := compute_again(model, request))}
        activations = {request.id: request.mix.activations for request in changed if request.mix.activations}
        self._emit(MixSet(mix, {request.id: request.new_tokens for request in requests}, activations, recomputed))

    def _give_slots(self, mix: Mix) -> None:
        """Slots for the standing mix at once; with its first request when others hold them all, or an adapter must be read first."""
        if not self._model.store.lacking(acting(mix)):
            with suppress(SlotsBusy):
                self._model.store.acquire(acting(mix), None, "the mix that was set")

    @contextmanager
    def _failing(self, tell: Callable[[str, bool], object]) -> Iterator[None]:
        """What cannot be had is told in words, with whether memory ran out; anything else is a fault and passes."""
        try:
            yield
        except Exception as error:
            if not refusal(error):
                raise
            tell(sentence(error), out_of_memory(error))

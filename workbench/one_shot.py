"""One reply on the command line: the same engine process and the same commands as the workbench, without the screen."""
from __future__ import annotations

import queue
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from ..engine import protocol as p
from . import exit_codes, output
from .arguments import AdapterArgument, escape
from .backends.local import LocalBackend
from .exit_codes import Failed
from .mixboard import mix_text, scale_text
from .text import clean_line

REQUEST = 1


@dataclass(frozen=True)
class Question:
    load: p.LoadModel
    adapters: tuple[AdapterArgument, ...]
    prompt: p.Prompt
    sampling: p.Sampling
    stats: bool
    json: bool


@dataclass
class _Reply:
    adapters: list[p.AdapterInfo] = field(default_factory=list)
    mix: list[p.AdapterUse] = field(default_factory=list)
    activations: tuple[p.Activation, ...] = ()
    text: list[str] = field(default_factory=list)


def ask(question: Question) -> int:
    """Load, ask, print; returns the exit code.

    Raises Failed when the reply cannot be had. KeyboardInterrupt and BrokenPipeError pass through with the engine ended.
    """
    events: queue.SimpleQueue[p.Event] = queue.SimpleQueue()
    backend = LocalBackend(events.put)
    try:
        backend.start()
        return _Conversation(question, backend, events).run()
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise Failed(f"the engine process cannot be started: {error}", exit_codes.ENGINE_ERROR) from error
    finally:
        backend.stop()


class _Conversation:
    def __init__(self, question: Question, backend: LocalBackend, events: queue.SimpleQueue[p.Event]) -> None:
        self._question = question
        self._backend = backend
        self._queue = events
        self._progress = output.ProgressLine()
        self._reply = _Reply()

    def run(self) -> int:
        try:
            model = self._load_model()
            for argument in self._question.adapters:
                self._load_adapter(argument)
            finished = self._generate()
        finally:
            self._progress.clear()
        self._report(model, finished)
        return exit_codes.OK

    def _events(self) -> Iterator[p.Event]:
        """What the engine says, without end; failures that end everything are raised."""
        while True:
            event = self._queue.get()
            if isinstance(event, p.EngineFailed):
                raise Failed(event.message, exit_codes.OUT_OF_MEMORY if event.out_of_memory else exit_codes.ENGINE_ERROR)
            if isinstance(event, p.CommandFailed):
                raise Failed(event.message, exit_codes.ENGINE_ERROR)
            yield event

    def _load_model(self) -> p.ModelInfo:
        self._progress.show("starting the engine process")
        self._backend.send(self._question.load)
        for event in self._events():
            match event:
                case p.ModelLoading():
                    self._progress.show(output.progress_text(event.phase, event.item, event.done, event.total))
                case p.ModelFailed():
                    unusable = exit_codes.INCOMPATIBLE if self._question.load.path else exit_codes.ENGINE_ERROR
                    raise Failed(event.message, exit_codes.OUT_OF_MEMORY if event.out_of_memory else unusable)
                case p.ModelLoaded():
                    self._warn(*(f"{event.model.name}: {note}" for note in event.model.notes))
                    return event.model
        raise AssertionError("the events never end")

    def _load_adapter(self, argument: AdapterArgument) -> None:
        self._progress.show(f"loading {argument.name or argument.path}")
        self._backend.send(p.LoadAdapter(argument.path, argument.name))
        for event in self._events():
            match event:
                case p.AdapterLoading():
                    self._progress.show(output.progress_text("adapter", argument.name or argument.path, event.done, event.total))
                case p.AdapterFailed():
                    raise Failed(event.message, exit_codes.OUT_OF_MEMORY if event.out_of_memory else exit_codes.INCOMPATIBLE)
                case p.AdapterLoaded():
                    self._reply.adapters.append(event.adapter)
                    self._reply.mix.append(p.AdapterUse(event.adapter.name, argument.scale))
                    self._warn(*(f"{event.adapter.name}: {note}" for note in event.adapter.notes))
                    if event.adapter.dora and not argument.scale:
                        self._warn(f"{event.adapter.name}: DoRA at scale 0 is off, the base itself; "
                                   "PEFT's scale 0 would keep the trained magnitudes")
                    if self._question.stats:
                        self._progress.clear()
                        output.narrate(_adapter_line(event.adapter, argument.scale))
                    return

    def _generate(self) -> p.RequestFinished:
        question = self._question
        self._progress.show("reading the question")
        self._backend.send(p.Generate(REQUEST, question.prompt, tuple(self._reply.mix), question.sampling))
        for event in self._events():
            match event:
                case p.RequestQueued():
                    self._warn(f"waiting: {event.because}")
                case p.RequestStarted():
                    self._reply.activations = event.activations
                    self._say_activations()
                case p.TextDelta():
                    self._reply.text.append(event.text)
                    if not question.json:
                        self._progress.clear()
                        output.write(event.text)
                case p.RequestFailed():
                    raise Failed(event.message, exit_codes.OUT_OF_MEMORY if event.out_of_memory else exit_codes.ENGINE_ERROR)
                case p.RequestFinished():
                    return event
        raise AssertionError("the events never end")

    def _warn(self, *texts: str) -> None:
        self._progress.clear()
        for text in texts:
            output.warn(text)

    def _say_activations(self) -> None:
        """An aLoRA that is off is a warning with the way to switch it on; one that acts is a figure."""
        invocations = {adapter.name: adapter.invocation for adapter in self._reply.adapters}
        for activation in self._reply.activations:
            if not activation.found:
                way = shlex.quote(clean_line(escape(invocations.get(activation.adapter, ""))))
                self._warn(f"{activation.adapter}: is off for this reply: {activation.detail}; --opening {way} invokes it")
            elif self._question.stats:
                self._progress.clear()
                output.narrate(f"{activation.adapter}: acts from prompt token {activation.start}: {activation.detail}")

    def _report(self, model: p.ModelInfo, finished: p.RequestFinished) -> None:
        reply = self._reply
        if self._question.json:
            data = {"model": model, "adapters": reply.adapters, "mix": reply.mix, "sampling": self._question.sampling,
                    "activations": reply.activations, "text": "".join(reply.text), "reason": finished.reason,
                    "ids": finished.ids, "stats": finished.stats}
            output.write(msgspec.json.encode(p.plain_data(data)).decode() + "\n")
        elif not "".join(reply.text).endswith("\n"):
            output.write("\n")
        if finished.reason in ("length", "context"):
            limit = "--max-tokens" if finished.reason == "length" else "--context"
            self._warn(f"the reply was cut at {finished.stats.new_tokens} tokens by {limit}")
        if self._question.stats:
            output.narrate(_stats_line(model, finished.stats, reply.mix, self._question.sampling))


def _adapter_line(info: p.AdapterInfo, scale: float) -> str:
    ranks = "/".join(str(rank) for rank in info.ranks)
    effective = "/".join(f"{scale * value:g}" for value in info.effective_scales)
    return f"{info.name}: {info.matched}/{info.total} modules, rank {ranks}, scale {scale_text(scale)} (effective {effective})"


def _stats_line(model: p.ModelInfo, stats: p.RequestStats, mix: list[p.AdapterUse], sampling: p.Sampling) -> str:
    drawn = f"seed {stats.seed}" if sampling.temperature > 0 else "greedy"
    return (f"{stats.new_tokens} tokens · {stats.decode_tokens_per_second:.1f} tok/s · TTFT {stats.ttft_ms / 1000:.2f} s · "
            f"{stats.prompt_tokens} prompt tokens · {drawn} · {mix_text(tuple(mix))} · {model.name} {model.dtype} on {model.device}")

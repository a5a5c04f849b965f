"""One reply on the command line: the same engine process and the same commands as the workbench, without the screen."""
from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ..engine import protocol as p
from . import exit_codes, output
from .arguments import AdapterArgument
from .engine_run import EngineRun, engine_run
from .exit_codes import Failed
from .mixboard import mix_text, scale_text
from .text import counted

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
    with engine_run() as engine:
        return _Conversation(question, engine).run()


class _Conversation:
    def __init__(self, question: Question, engine: EngineRun) -> None:
        self._question, self._engine = question, engine
        self._reply = _Reply()

    def run(self) -> int:
        model = self._engine.load_model(self._question.load)
        for argument in self._question.adapters:
            self._load_adapter(argument)
        finished = self._generate()
        self._engine.progress.clear()
        self._report(model, finished)
        return exit_codes.OK

    def _load_adapter(self, argument: AdapterArgument) -> None:
        info = self._engine.load_adapter(argument)
        self._reply.adapters.append(info)
        self._reply.mix.append(p.AdapterUse(info.name, argument.scale))
        if self._question.stats:
            self._engine.progress.clear()
            output.narrate(_adapter_line(info, argument.scale))

    def _generate(self) -> p.RequestFinished:
        question, engine = self._question, self._engine
        engine.progress.show("reading the question")
        engine.send(p.Generate(REQUEST, question.prompt, tuple(self._reply.mix), question.sampling))
        for event in engine.events():
            match event:
                case p.RequestQueued():
                    engine.progress.show(f"waiting: {event.because}")
                case p.RequestStarted():
                    self._reply.activations = event.activations
                    self._say_activations()
                case p.TextDelta():
                    self._reply.text.append(event.text)
                    if not question.json:
                        engine.progress.clear()
                        output.write(event.text)
                case p.RequestFailed():
                    raise Failed(event.message, exit_codes.OUT_OF_MEMORY if event.out_of_memory else exit_codes.ENGINE_ERROR)
                case p.RequestFinished():
                    return event
        raise AssertionError("the events never end")

    def _say_activations(self) -> None:
        """An aLoRA that is off is a warning; one that acts is a figure."""
        self._engine.warn_of_silent(self._reply.activations, self._reply.adapters, "this reply")
        for activation in self._reply.activations:
            if activation.found and self._question.stats:
                self._engine.progress.clear()
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
        if not "".join(reply.text).strip():
            self._engine.warn(f"the reply has no text: it ended after {counted(finished.stats.new_tokens, 'token')}")
        if finished.reason in ("length", "context"):
            limit = "--max-tokens" if finished.reason == "length" else "--context"
            self._engine.warn(f"the reply was cut at {finished.stats.new_tokens} tokens by {limit}")
        elif finished.reason == "memory":
            self._engine.warn(f"the reply was cut at {finished.stats.new_tokens} tokens: {finished.detail}")
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

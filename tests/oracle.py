"""Random lives of an engine, and an engine without a cache that says what each token should have been drawn from."""
from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine_bench import Bench
from torch import Tensor

from lora_bench.engine.look import look
from lora_bench.engine.mix_history import MixHistory, Part
from lora_bench.engine.protocol import AdapterUse, Generate, GenerateTogether, Mix, Sampling, TokenIds
from lora_bench.engine.request import Request

Contents = Mapping[str, Sequence[Path]]
"""adapters by name: folders, onto any of which each may be reloaded"""
SCALES = (0.0, 0.25, 0.25, 0.5)
COMMANDS = {"ask": 8, "together": 2, "abort": 1, "mix": 3, "reload": 2, "clear": 0.3}
"""what is done in a life, and how often"""


@dataclass(slots=True)
class Drawn:
    """A token was drawn behind the first `tokens` ones of a request; what acted then."""

    request: Request
    tokens: int
    history: MixHistory


@dataclass(frozen=True, slots=True)
class Prompts:
    """What requests begin with: one of `stems`, as far as one of `lengths` says, and one of `tails`."""

    stems: Sequence[Sequence[int]]
    lengths: Sequence[int]
    tails: Sequence[Sequence[int]]


@dataclass(slots=True)
class Life:
    """Random commands to an engine whose adapters lie in `place`, one folder each that is written over before a reload.

    `asked` holds what was asked of it, by number.
    """

    draw: random.Random
    bench: Bench
    contents: Contents
    place: Path
    prompts: Prompts
    replies: Sequence[int] = (1, 5, 20, 40)
    """the tokens of one"""
    hot: Mapping[str, float] = field(default_factory=lambda: {"temperature": 1.0, "top_p": 0.9})
    """how one of three is drawn that is not greedy"""
    commands: Mapping[str, float] = field(default_factory=lambda: dict(COMMANDS))
    asked: dict[int, Generate] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        for name in self.contents:
            (self.place / name).mkdir(parents=True)
            self._load(name)

    def mix(self) -> Mix:
        loaded = [name for name in self.contents if name in self.bench.engine.adapter_names]
        names = self.draw.sample(loaded, min(len(loaded), self.draw.choice((0, 1, 1, 2))))
        return tuple(AdapterUse(name, self.draw.choice(SCALES)) for name in names)

    def generate(self, prompt: Sequence[int] | None = None) -> Generate:
        draw, prompts = self.draw, self.prompts
        self.number += 1
        prompt = prompt or [*draw.choice(prompts.stems)[:draw.choice(prompts.lengths)], *draw.choice(prompts.tails)]
        hot = self.hot if draw.random() < 0.3 else {}
        return Generate(self.number, TokenIds(tuple(prompt)), self.mix(), Sampling(max_tokens=draw.choice(self.replies), seed=7, **hot))

    def next(self) -> str:
        """Give a command; returns which, "" when it was refused in words: slots, unknown requests."""
        what = self.draw.choices([*self.commands], [*self.commands.values()])[0]
        with suppress(ValueError):
            getattr(self, f"_{what}")()
            return what
        return ""

    def _ask(self) -> None:
        self._submit([self.generate()])

    def _together(self) -> None:
        first = self.generate()
        self._submit([first, self.generate(first.prompt.ids)])

    def _abort(self) -> None:
        self.bench.engine.abort(self.draw.randint(1, self.number + 1))

    def _mix(self) -> None:
        running = self.bench.engine.model.scheduler.running[:2]
        self.bench.engine.set_mix(self.mix(), [request.id for request in running],
                                  self.draw.choice(("splice", "splice", "recompute", "finish")))

    def _reload(self) -> None:
        name = self.draw.choice([*self.contents])
        self._write(name)
        self.bench.engine.reload_adapter(name)

    def _load_or_unload(self) -> None:
        missing = [name for name in self.contents if name not in self.bench.engine.adapter_names]
        if missing:
            self._load(self.draw.choice(missing))
        else:
            self.bench.engine.unload_adapter(self.draw.choice([*self.contents]))

    def _clear(self) -> None:
        self.bench.engine.clear_cache()

    def _load(self, name: str) -> None:
        self._write(name)
        self.bench.engine.load_adapter(str(self.place / name), name)

    def _write(self, name: str) -> None:
        for file in self.draw.choice(self.contents[name]).iterdir():
            (self.place / name / file.name).write_bytes(file.read_bytes())

    def _submit(self, commands: list[Generate]) -> None:
        self.bench.engine.submit_together(GenerateTogether(tuple(commands)))
        self.asked |= {command.request_id: command for command in commands}


class Fresh:
    """An engine with all contents loaded under names of their own and a cache that is emptied before every look."""

    def __init__(self, base: Path, contents: Contents, **load: object) -> None:
        self.bench = Bench(base, slots=sum(map(len, contents.values())), **load)
        for name, folders in contents.items():
            for number, folder in enumerate(folders):
                self.bench.engine.load_adapter(str(folder), f"{name}-{number}")
        store = self.bench.engine.model.store
        self.names = {info.digest: name for name, info in store.infos.items()}
        store.acquire([*store.infos], None, "a test")

    def logits(self, ids: Sequence[int], history: MixHistory) -> Iterator[Tensor]:
        """[tokens, vocab] of each step, in order: at each of `ids`, on which acts what `history` says."""
        engine, model = self.bench.engine, self.bench.engine.model
        engine.clear_cache()
        request = engine.make_request(-1, list(ids), (), Sampling(max_tokens=1))
        request.history = MixHistory(tuple(Part(part.start, replace(part.mix, awaited=(), active=tuple(
            replace(use, name=self.names[use.digest]) for use in part.mix.active))) for part in history.parts))
        with look(model, [request], "the oracle", 0) as scheduler:
            while works := scheduler.plan():
                yield model.runner.logits(works, every=True)

    def asked(self, command: Generate, history: MixHistory) -> Generate:
        """`command` with the contents that `history` has under the names that they have here."""
        digests = {history.mix.mix[use.place].name: use.digest for use in history.mix.active}
        mix = tuple(AdapterUse(self.names[digests[use.name]] if use.name in digests else f"{use.name}-0", use.scale) for use in command.mix)
        return Generate(command.request_id, command.prompt, mix, command.sampling)

    def replies(self, commands: Sequence[Generate]) -> dict[int, tuple[int, ...]]:
        """By number, of requests that run together."""
        self.bench.engine.clear_cache()
        self.bench.events.clear()
        for command in commands:
            self.bench.engine.submit(command)
        self.bench.run()
        return {command.request_id: self.bench.ids(command.request_id) for command in commands}


def alike(draws: Sequence[Drawn]) -> list[list[Drawn]]:
    """Those of a request under one history together: one look is enough for them, since what comes later changes no logits."""
    found: dict[tuple[int, object], list[Drawn]] = {}
    for drawn in draws:
        found.setdefault((drawn.request.id, drawn.history.stretches), []).append(drawn)
    return [*found.values()]

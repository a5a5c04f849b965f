"""The oracle: whatever an engine with a tiny KV memory went through, it drew from the logits of an engine that has no cache.

Plain, rsLoRA, DoRA and aLoRA adapters; chats that share beginnings, alone and in groups; live changes, reloads onto other content, aborts,
preemptions, cleared caches.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_bench import Bench
from peft_files import edit
from properties import EXAMPLES
from torch import Tensor

from lora_bench.engine import loaded
from lora_bench.engine.look import look
from lora_bench.engine.mix_history import MixHistory, Part
from lora_bench.engine.models.facts import ModelFacts, module_shapes
from lora_bench.engine.protocol import (
    AdapterUse,
    Generate,
    GenerateTogether,
    Mix,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Sampling,
    TokenIds,
)
from lora_bench.engine.request import Request
from lora_bench.engine.scheduler import Work
from lora_bench.engine.stretches import Stretch

pytestmark = pytest.mark.calm

Write = Callable[..., Path]
KINDS = {
    "plain": (("q_proj", "down_proj"), {}), "rank": (("k_proj", "v_proj"), {"use_rslora": True}),
    "dora": (("v_proj", "up_proj"), {"use_dora": True}), "alora": (("q_proj", "v_proj"), {"alora_invocation_tokens": [9, 10]}),
}
"""name -> (targets, config)"""
CONTENTS = 2
"""each adapter is reloaded onto either of so many"""
SCALES = (0.0, 0.25, 0.25, 0.5)
COMMANDS = 80
NEAR = 1e-4
"""of the largest logit: what fp32 may round otherwise in another batch"""


@dataclass
class Drawn:
    """The logits [vocab] from which the token behind the first `tokens` ones was drawn, and what acted then."""

    request: Request
    tokens: int
    history: MixHistory
    logits: Tensor


class Recorded(Bench):
    """An engine whose draws are kept."""

    def __init__(self, base: Path, **load: object) -> None:
        super().__init__(base, **load)
        self.draws: list[Drawn] = []
        self.asked: dict[int, Generate] = {}
        runner = self.engine.model.runner
        forward = runner._forward

        def recorded(works: Sequence[Work], every: bool = False) -> tuple[Tensor, object]:
            logits, lora = forward(works, every)
            if not every:
                for work, row in zip([work for work in works if work.sampled], logits, strict=True):
                    self.draws.append(Drawn(work.request, len(work.request.ids), work.request.history, row.clone()))
            return logits, lora

        runner._forward = recorded


@pytest.fixture
def folders(adapter_folder: Write, tiny_facts: ModelFacts) -> dict[str, list[Path]]:
    """Each adapter's contents."""
    shapes = module_shapes(tiny_facts)

    def magnitudes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        paths = [name.removesuffix(".lora_B.weight") for name in tensors if "lora_B" in name]
        return {f"{path}.lora_magnitude_vector": torch.rand(shapes[path.removeprefix("base_model.model.model.")][0]) + 4 for path in paths}

    made = {name: [adapter_folder(f"{name}-{i}", targets, r=3, **config) for i in range(CONTENTS)]
            for name, (targets, config) in KINDS.items()}
    for folder in made["dora"]:
        edit(folder, lambda tensors: tensors.update(magnitudes(tensors)))
    return made


class Life:
    """Random commands to a recorded engine whose adapters lie in `places`, one folder each that is written over before a reload."""

    def __init__(self, seed: int, bench: Recorded, folders: dict[str, list[Path]], place: Path) -> None:
        self.draw, self.bench, self.folders, self.number = random.Random(seed), bench, folders, 0
        self.stems = [[self.draw.randrange(5, 50) for _ in range(110)] for _ in range(2)]
        self.places = {name: place / name for name in folders}
        for name, folder in self.places.items():
            folder.mkdir(parents=True)
            self._write(name)
            bench.engine.load_adapter(str(folder), name)

    def _write(self, name: str) -> None:
        for file in self.draw.choice(self.folders[name]).iterdir():
            (self.places[name] / file.name).write_bytes(file.read_bytes())

    def mix(self) -> Mix:
        names = self.draw.sample([*KINDS], self.draw.choice((0, 1, 1, 2)))
        return tuple(AdapterUse(name, self.draw.choice(SCALES)) for name in names)

    def generate(self, prompt: Sequence[int] | None = None) -> Generate:
        draw = self.draw
        self.number += 1
        stem = draw.choice(self.stems)
        prompt = prompt or [*stem[:draw.choice((1, 16, 30, 48, 60, 100))], *draw.choice(([], [9, 10], [7, 9, 10, 11]))]
        hot = {"temperature": 1.0, "top_p": 0.9} if draw.random() < 0.3 else {}
        return Generate(self.number, TokenIds(tuple(prompt)), self.mix(), Sampling(max_tokens=draw.choice((1, 5, 20, 40)), seed=7, **hot))

    def next(self) -> None:
        draw, engine = self.draw, self.bench.engine
        what = draw.choices(("ask", "together", "abort", "mix", "reload", "clear"), (8, 2, 1, 3, 2, 0.3))[0]
        with suppress(ValueError):  # refusals in words: slots, unknown requests
            if what == "ask":
                self._submit([self.generate()])
            elif what == "together":
                first = self.generate()
                self._submit([first, self.generate(first.prompt.ids)])
            elif what == "abort":
                engine.abort(draw.randint(1, self.number + 1))
            elif what == "mix":
                engine.set_mix(self.mix(), [request.id for request in engine.model.scheduler.running[:2]],
                               draw.choice(("splice", "splice", "recompute", "finish")))
            elif what == "reload":
                name = draw.choice([*KINDS])
                self._write(name)
                engine.reload_adapter(name)
            else:
                engine.clear_cache()

    def _submit(self, commands: list[Generate]) -> None:
        self.bench.engine.submit_together(GenerateTogether(tuple(commands)))
        self.bench.asked |= {command.request_id: command for command in commands}


class Fresh:
    """An engine with all contents loaded under names of their own and a cache that is emptied before every look."""

    def __init__(self, base: Path, folders: dict[str, list[Path]]) -> None:
        self.bench = Bench(base, slots=len(KINDS) * CONTENTS)
        for name, contents in folders.items():
            for number, folder in enumerate(contents):
                self.bench.engine.load_adapter(str(folder), f"{name}-{number}")
        store = self.bench.engine.model.store
        self.names = {info.digest: name for name, info in store.infos.items()}
        store.acquire([*store.infos], None, "a test")

    def logits(self, ids: Sequence[int], history: MixHistory) -> Tensor:
        """[tokens, vocab] at each of `ids`, on which acts what `history` says."""
        engine, model = self.bench.engine, self.bench.engine.model
        engine.clear_cache()
        request = engine.make_request(-1, list(ids), (), Sampling(max_tokens=1))
        request.history = MixHistory(tuple(Part(part.start, replace(part.mix, awaited=(), active=tuple(
            replace(use, name=self.names[use.digest]) for use in part.mix.active))) for part in history.parts))
        rows = []
        with look(model, [request], "the oracle", 0) as scheduler:
            while works := scheduler.plan():
                rows.append(model.runner.logits(works, every=True))
        return torch.cat(rows)

    def reply(self, command: Generate, history: MixHistory) -> tuple[int, ...]:
        """To `command` as it was asked, with the contents that `history` has."""
        digests = {history.mix.mix[use.place].name: use.digest for use in history.mix.active}
        mix = tuple(AdapterUse(self.names[digests[use.name]] if use.name in digests else f"{use.name}-0", use.scale) for use in command.mix)
        self.bench.engine.clear_cache()
        self.bench.events.clear()
        self.bench.engine.submit(Generate(command.request_id, command.prompt, mix, command.sampling))
        self.bench.run()
        return self.bench.ids(command.request_id)


@pytest.mark.parametrize("run", range(max(EXAMPLES // 100, 1)))
def test_every_draw_is_from_the_logits_of_an_engine_without_a_cache(
        base: Path, folders: dict[str, list[Path]], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    make_config = loaded.make_config
    fresh = Fresh(base, folders)
    blocks = random.Random(seed).choice((14, 20, 30))
    monkeypatch.setattr(loaded, "make_config", lambda *asked: replace(make_config(*asked), blocks=blocks, step_tokens=48))
    bench = Recorded(base, slots=3)
    life = Life(seed, bench, folders, tmp_path / "places")
    for _ in range(COMMANDS):
        life.next()
        bench.run(life.draw.choice((0, 1, 2, 5)))
    bench.run()
    memory = bench.engine.model.memory
    assert memory.free == memory.blocks and not bench.engine.model.scheduler.waiting
    ended = [event.request_id for kind in (RequestFinished, RequestFailed) for event in bench.of(kind)]
    assert sorted(ended) == sorted(bench.asked), "each request ends once"
    assert any(event.cache.hit_tokens for event in bench.of(RequestStarted)) and bench.draws
    print(f"{len(ended)} requests, {len(bench.draws)} draws, {len(bench.of(RequestPreempted))} preemptions")
    check_logits(fresh, bench.draws)
    _check_replies(fresh, bench)


def check_logits(fresh: Fresh, draws: Sequence[Drawn]) -> None:
    """One look for all draws of a request under one history: what comes later changes no logits."""
    alike: dict[tuple[int, tuple[Stretch, ...]], list[Drawn]] = {}
    for drawn in draws:
        alike.setdefault((drawn.request.id, drawn.history.stretches), []).append(drawn)
    for (number, _), group in alike.items():
        history = group[0].history
        ids = group[0].request.ids[:max(drawn.tokens for drawn in group)]
        logits = fresh.logits(ids, history)
        for drawn in group:
            expected = logits[drawn.tokens - 1]
            torch.testing.assert_close(
                drawn.logits[:len(expected)].float(), expected, rtol=0, atol=NEAR * expected.abs().max().item(),
                msg=lambda text, who=(number, drawn.tokens, history): f"request, token, history {who}: {text}")


def _check_replies(fresh: Fresh, bench: Recorded) -> None:
    """Whose mix was never changed replies as if it were alone; where the two best logits are as good as equal, up to there."""
    last = {drawn.request.id: drawn for drawn in bench.draws}
    histories = {number: {drawn.history.stretches for drawn in bench.draws if drawn.request.id == number} for number in last}
    for event in bench.of(RequestFinished):
        number, drawn = event.request_id, last.get(event.request_id)
        if drawn is None or event.reason != "length" or len(histories[number]) > 1 or drawn.history.mix.mix != bench.asked[number].mix:
            continue
        alone = fresh.reply(bench.asked[number], drawn.history)
        if event.ids != alone:
            at = next(i for i, (a, b) in enumerate(zip(event.ids, alone, strict=False)) if a != b)
            tokens = drawn.request.prompt_tokens + at
            best = next(one.logits for one in bench.draws if one.request is drawn.request and one.tokens == tokens).topk(2).values
            assert bench.asked[number].sampling.temperature == 0 and best[0] - best[1] < NEAR * best[0].abs(), (number, event.ids, alone)

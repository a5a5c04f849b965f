"""The oracle: whatever an engine with a tiny KV memory went through, it drew from the logits of an engine that has no cache.

Plain, rsLoRA, DoRA and aLoRA adapters; chats that share beginnings, alone and in groups; live changes, reloads onto other content, aborts,
preemptions, cleared caches.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_bench import Bench
from oracle import Drawn, Fresh, Life, Prompts, alike
from peft_files import edit
from properties import EXAMPLES
from torch import Tensor

from lora_bench.engine import loaded
from lora_bench.engine.models.facts import ModelFacts, module_shapes
from lora_bench.engine.protocol import Generate, RequestFailed, RequestFinished, RequestPreempted, RequestStarted
from lora_bench.engine.scheduler import Work

pytestmark = pytest.mark.calm

Write = Callable[..., Path]
KINDS = {
    "plain": (("q_proj", "down_proj"), {}), "rank": (("k_proj", "v_proj"), {"use_rslora": True}),
    "dora": (("v_proj", "up_proj"), {"use_dora": True}), "alora": (("q_proj", "v_proj"), {"alora_invocation_tokens": [9, 10]}),
}
"""name -> (targets, config)"""
CONTENTS = 2
"""each adapter is reloaded onto either of so many"""
COMMANDS = 80
NEAR = 1e-4
"""of the largest logit: what fp32 may round otherwise in another batch"""


@dataclass(slots=True)
class DrawnFrom(Drawn):
    """From these logits [vocab]."""

    logits: Tensor


class Recorded(Bench):
    """An engine whose draws are kept."""

    def __init__(self, base: Path, **load: object) -> None:
        super().__init__(base, **load)
        self.draws: list[DrawnFrom] = []
        runner = self.engine.model.runner
        forward = runner._forward

        def recorded(works: Sequence[Work], every: bool = False) -> tuple[Tensor, object]:
            logits, lora = forward(works, every)
            if not every:
                for work, row in zip([work for work in works if work.sampled], logits, strict=True):
                    self.draws.append(DrawnFrom(work.request, len(work.request.ids), work.request.history, row.clone()))
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


def stems(draw: random.Random) -> Prompts:
    """Chats of tokens that are in no way special, some of which invoke an aLoRA."""
    return Prompts([[draw.randrange(5, 50) for _ in range(110)] for _ in range(2)], (1, 16, 30, 48, 60, 100), ((), (9, 10), (7, 9, 10, 11)))


@pytest.mark.parametrize("run", range(max(EXAMPLES // 100, 1)))
def test_every_draw_is_from_the_logits_of_an_engine_without_a_cache(
        base: Path, folders: dict[str, list[Path]], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    make_config = loaded.make_config
    fresh = Fresh(base, folders)
    blocks = random.Random(seed).choice((14, 20, 30))
    monkeypatch.setattr(loaded, "make_config", lambda *asked: replace(make_config(*asked), blocks=blocks, step_tokens=48))
    bench = Recorded(base, slots=3)
    draw = random.Random(seed)
    life = Life(draw, bench, folders, tmp_path / "places", stems(draw))
    for _ in range(COMMANDS):
        life.next()
        bench.run(life.draw.choice((0, 1, 2, 5)))
    bench.run()
    memory = bench.engine.model.memory
    assert memory.free == memory.blocks and not bench.engine.model.scheduler.waiting
    ended = [event.request_id for kind in (RequestFinished, RequestFailed) for event in bench.of(kind)]
    assert sorted(ended) == sorted(life.asked), "each request ends once"
    assert any(event.cache.hit_tokens for event in bench.of(RequestStarted)) and bench.draws
    print(f"{len(ended)} requests, {len(bench.draws)} draws, {len(bench.of(RequestPreempted))} preemptions")
    check_logits(fresh, bench.draws)
    _check_replies(fresh, bench, life.asked)


def check_logits(fresh: Fresh, draws: Sequence[DrawnFrom]) -> None:
    for group in alike(draws):
        request, history = group[0].request, group[0].history
        logits = torch.cat([*fresh.logits(request.ids[:max(drawn.tokens for drawn in group)], history)])
        for drawn in group:
            expected = logits[drawn.tokens - 1]
            torch.testing.assert_close(
                drawn.logits[:len(expected)].float(), expected, rtol=0, atol=NEAR * expected.abs().max().item(),
                msg=lambda text, who=(request.id, drawn.tokens, history): f"request, token, history {who}: {text}")


def _check_replies(fresh: Fresh, bench: Recorded, asked: Mapping[int, Generate]) -> None:
    """Whose mix was never changed replies as if it were alone; where the two best logits are as good as equal, up to there."""
    last = {drawn.request.id: drawn for drawn in bench.draws}
    histories = {number: {drawn.history.stretches for drawn in bench.draws if drawn.request.id == number} for number in last}
    for event in bench.of(RequestFinished):
        number, drawn = event.request_id, last.get(event.request_id)
        if drawn is None or event.reason != "length" or len(histories[number]) > 1 or drawn.history.mix.mix != asked[number].mix:
            continue
        alone = fresh.replies([fresh.asked(asked[number], drawn.history)])[number]
        if event.ids != alone:
            at = next(i for i, (a, b) in enumerate(zip(event.ids, alone, strict=False)) if a != b)
            tokens = drawn.request.prompt_tokens + at
            best = next(one.logits for one in bench.draws if one.request is drawn.request and one.tokens == tokens).topk(2).values
            assert asked[number].sampling.temperature == 0 and best[0] - best[1] < NEAR * best[0].abs(), (number, event.ids, alone)

"""The oracle of test_kv_oracle.py on bases that look back through windows or turn by longrope, under adapters that change embedding, head,
norms, biases and rows of tokens, with invocations that replies write themselves."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import Fresh, Life
from peft_files import edit
from test_kv_oracle import Recorded, check_logits, folders, stems
from torch import Tensor

from lora_bench.engine import loaded
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.protocol import InvocationFired, RequestStarted

pytestmark = pytest.mark.calm

Write = Callable[..., Path]
TRAINED = 70
"""tokens up to which the base with longrope turns by the short factors"""
BASES = {
    "windows": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 21},
    "longrope": {"original_max_position_embeddings": TRAINED, "rope_scaling": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 4.0, 9.0], "factor": 4.0}},
}
COMMANDS = 100

__all__ = ["folders"]  # a fixture


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest, tiny_folder: Write, talking_head: Tensor) -> Path:
    return tiny_folder(config=BASES[request.param], tensors={"lm_head.weight": talking_head})


@pytest.fixture
def contents(folders: dict[str, list[Path]], tiny_facts: ModelFacts) -> dict[str, list[Path]]:
    """Of `folders` the plain ones with whole embedding, head and last norm; those of rsLoRA with biases and rows of tokens."""
    f, path = tiny_facts, "base_model.model.model"
    for folder in folders["plain"]:
        whole = {f"{path}.embed_tokens": (f.vocab, f.hidden), "base_model.model.lm_head": (f.vocab, f.hidden), f"{path}.norm": (f.hidden,)}
        edit(folder, lambda tensors, whole=whole: tensors.update(
            {f"{name}.weight": torch.randn(size) * 0.3 for name, size in whole.items()}),
             modules_to_save=["embed_tokens", "lm_head", "model.norm"])
    for folder in folders["rank"]:
        edit(folder, lambda tensors: tensors.update(
            {name.replace("weight", "bias"): torch.randn(len(tensor)) for name, tensor in tensors.items() if "lora_B" in name}
            | {f"{path}.embed_tokens.token_adapter.trainable_tokens_delta": torch.randn(3, f.hidden) * 0.3}),
             lora_bias=True, trainable_token_indices={"embed_tokens": [7, 9, 30]})
    return folders


def test_every_draw_is_from_the_logits_of_an_engine_without_a_cache(
        base: Path, contents: dict[str, list[Path]], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, make_config, chance = Fresh(base, contents), loaded.make_config, random.Random(seed)
    blocks, slots = chance.choice((11, 14, 20)), chance.choice((2, 3))
    monkeypatch.setattr(loaded, "make_config", lambda *asked: replace(make_config(*asked), blocks=blocks, step_tokens=48))
    bench = Recorded(base, slots=slots)
    life = Life(chance, bench, contents, tmp_path / "places", stems(chance))
    for _ in range(COMMANDS):
        if life.draw.random() < 0.2 and bench.draws:
            written = life.draw.choice(bench.draws).request.ids[-1:]
            bench.engine.set_invocation("alora", bench.engine.model.store.text(written), in_reply=True)
        life.next()
        bench.run(life.draw.choice((0, 1, 2, 5)))
    bench.run()
    memory = bench.engine.model.memory
    assert memory.free == memory.blocks and not bench.engine.model.scheduler.waiting
    assert any(event.cache.hit_tokens for event in bench.of(RequestStarted)) and bench.draws
    print(f"{len(bench.draws)} draws, {len(bench.of(InvocationFired))} invocations in replies")
    for long in (False, True):
        check_logits(fresh, [drawn for drawn in bench.draws if (drawn.tokens > TRAINED) == long])

"""Adapters that are more than low rank in captured steps: the logits of the plain forward, and other rows as if they were not there."""
from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from acting_bench import change_all
from conftest import tiny_tokenizer
from engine_bench import Bench, random_ids
from gguf_file import FACTS, write_gguf
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_models import VOCAB, make_model, save_folder

from lora_bench.engine import loaded
from lora_bench.engine.device_step import DeviceStep
from lora_bench.engine.mix_history import MixHistory
from lora_bench.engine.models.facts import module_shapes
from lora_bench.engine.protocol import AdapterUse, GraphCaptured, Mix, StepFinished, TokenIds

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice on configs that are random on purpose
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
NORMS = ["norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]},
    "dora": {"target_modules": [*ATTENTION, *MLP], "use_dora": True},
    "dora_qv": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "dora_head": {"target_modules": ["lm_head", "down_proj"], "use_dora": True},
    "dora_embedding": {"target_modules": ["embed_tokens", "k_proj"], "use_dora": True},
    "lora_bias": {"target_modules": ["k_proj", "o_proj", "up_proj"], "lora_bias": True},
    "lora_bias2": {"target_modules": ["k_proj", "up_proj"], "lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "norms": {"target_modules": ["o_proj"], "modules_to_save": NORMS},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 9, 41]}},
    "saved_embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head_tokens": {"target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": [7, 8], "lm_head": [7, 30]}},
    "saved_head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"], "use_dora": True},
    "grown": {"target_modules": ["q_proj"]},
    "biases": {"target_modules": ["q_proj", "down_proj"], "bias": "all", "use_dora": True},
}
BASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "granite": {"tie_word_embeddings": False}, "gemma2": {}, "olmo2": {"tie_word_embeddings": False}}
MIXES = (
    ("dora",), ("plain", "dora"), ("dora_qv",), ("dora_head", "norms"), ("dora_embedding",), ("lora_bias", "dora_qv"), ("embedding",),
    ("norms", "tokens"), ("saved_embedding", "embedding", "plain"), ("biases",), ("head_tokens", "dora_qv"),
    ("saved_head",), ("grown",), ("dora", "plain"), ("lora_bias", "dora_qv", "norms", "lora_bias2", "plain"), ("plain",), ())


class _Own(Bench):
    """An engine whose adapters lie in pages and whose steps are those of the device; `drawn` has every row."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, **load: object) -> None:
        make_config = loaded.make_config
        monkeypatch.setattr(loaded, "make_config", lambda *asked: replace(make_config(*asked), blocks=96, step_tokens=128, pages=24))
        super().__init__(base, **{"slots": 16} | load)
        monkeypatch.undo()
        if load.get("device") != "cuda":
            self.engine.model.runner.use_device_step(16, self.events.append)
        for path in sorted(folder.iterdir()):
            self.engine.load_adapter(str(path), path.name)
        self.drawn: list[tuple[MixHistory, tuple[int, ...], torch.Tensor]] = []
        self._step: DeviceStep = self.engine.model.runner._device_step
        begin, end = self._step.begin, self._step.end
        asked: list[list[tuple[MixHistory, tuple[int, ...]]]] = []

        def begins(requests: list[Any]) -> str:
            asked.append([(request.history, tuple(request.ids)) for request in requests])
            return begin(requests)

        def ends() -> object:
            done = end()
            self.drawn += [(*one, row.clone()) for one, row in zip(asked[-1], self._step._forward.logits, strict=False)]
            return done

        self._step.begin, self._step.end = begins, ends  # type: ignore[method-assign]


def _prepare(kind: str, folder: Path) -> tuple[Path, Path]:
    """A base, and a folder with an adapter of each of KINDS that it can have."""
    model = make_model(kind, **BASES[kind])
    base, tied = save_folder(model, folder / "base", tiny_tokenizer()), model.config.tie_word_embeddings
    for name, options in KINDS.items():
        if name == "biases" and kind != "llama" or tied and name in ("saved_embedding", "head_tokens", "saved_head"):
            continue
        own = copy.deepcopy(model)
        if name == "grown":
            own.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
        if name == "norms":
            held = {key.split(".")[-2] for key in dict(model.named_parameters())}
            options = options | {"modules_to_save": [norm for norm in NORMS if norm in held and (norm != "norm" or "q_norm" not in held)]}
        lora = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **options)
        peft = change_all(get_peft_model(own, lora), "default")
        for key, parameter in peft.named_parameters():
            if name == "biases" and key.endswith(".bias") and "lora_" not in key:
                parameter.data += torch.randn_like(parameter) * 0.2
        peft.save_pretrained(folder / "adapters" / name, save_embedding_layers=name == "grown" or "auto")
        if name == "grown":
            words = tiny_tokenizer()
            words["added_tokens"] += [words["added_tokens"][0] | {"id": VOCAB + i, "content": f"<new{i}>"} for i in range(3)]
            (folder / "adapters" / name / "tokenizer.json").write_text(json.dumps(words))
    return base, folder / "adapters"


def _mix(names: tuple[str, ...], scale: Callable[[], float]) -> Mix:
    return tuple(AdapterUse(name, scale()) for name in names)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", BASES)
def test_logits_are_those_of_the_plain_forward(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: None, seed: int,
) -> None:
    """Rows of all kinds in one step, that come and go and change their scales."""
    base, folder = _prepare(kind, tmp_path)
    bench, draw = _Own(base, monkeypatch, folder, device=device, dtype="fp32"), random.Random(seed)
    there = {path.name for path in folder.iterdir()}
    asked = [_mix(names, lambda: draw.choice((1.0, 0.5, -0.7))) for names in MIXES if there.issuperset(names)]
    for number, mix in enumerate(asked):
        added = (VOCAB + 1,) * any(use.name == "grown" for use in mix)
        ids = TokenIds((*random_ids(draw.randint(3, 20), seed + number), *added))
        bench.submit(number, ids, mix, max_tokens=draw.randint(4, 10))
        bench.run(1)
    bench.engine.set_mix(asked[0], [1], "recompute")
    bench.run(2)
    bench.engine.set_mix(_mix(MIXES[1], lambda: 0.3), [0], "recompute")
    bench.run()
    paths = {step.path for step in bench.of(StepFinished)}
    assert "graph" in paths and not [path for path in paths if path.startswith("eager") and not path.endswith(("prompt", "prompts"))], paths
    captured = [(event.rows, event.adapters, event.more) for event in bench.of(GraphCaptured)]
    assert len(captured) == len(set(captured)) and not [event.problem for event in bench.of(GraphCaptured) if event.problem]
    assert len(bench.drawn) > 3 * len(asked)
    for history, ids, logits in draw.sample(bench.drawn, 40):
        ((mix, _, _),) = history.pieces(0, len(ids))
        expected = bench.engine.logits(ids, mix.mix).cpu()
        assert (logits[: len(expected)].cpu().float() - expected).norm() <= 2e-5 * expected.norm(), mix.mix


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_rows_do_not_see_what_others_have_of_their_own(
    kind: str, dtype: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: None, seed: int,
) -> None:
    """Bit for bit, whether they have adapters of their own or none; always beside one that is of low rank."""
    base, folder = _prepare(kind, tmp_path)
    bench, draw = _Own(base, monkeypatch, folder, device=device, dtype=dtype), random.Random(seed)
    there = {path.name for path in folder.iterdir()}
    mixes = [_mix(names, lambda: 0.7) for names in MIXES if there.issuperset(names)]
    for number, mix in enumerate(mixes[-4:] + mixes[:3]):
        prompt, found = TokenIds(random_ids(12, seed + number)), []
        for company in (False, True):
            bench.engine.clear_cache()
            bench.drawn.clear()
            bench.submit(1, prompt, mix, max_tokens=12)
            bench.run(2)
            bench.submit(2, TokenIds(random_ids(5, seed + 31)), _mix(("plain",), lambda: 0.7), max_tokens=20)
            bench.run(1)
            for other in range(3, 7 if company else 3):
                bench.submit(other, TokenIds(random_ids(draw.randint(2, 9), seed + 31 * other)), draw.choice(mixes), max_tokens=9)
                bench.run(1)
            bench.run()
            found.append([(ids, logits[:VOCAB]) for _, ids, logits in bench.drawn if ids[: len(prompt.ids)] == prompt.ids])
        assert len(found[0]) == len(found[1]) == 11
        for (ids, alone), (others, beside) in zip(*found, strict=True):
            assert ids == others and torch.equal(alone, beside), (mix, len(ids))


def test_what_no_graph_has_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: None, seed: int) -> None:
    model = make_model("llama", tie_word_embeddings=False)
    base = save_folder(model, tmp_path / "base", tiny_tokenizer())
    for name in ("plain", "saved_head", "dora", "dora_qv"):
        peft = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, init_lora_weights=False, **KINDS[name]))
        change_all(peft, "default").save_pretrained(tmp_path / "adapters" / name)
    bench = _Own(base, monkeypatch, tmp_path / "adapters")
    monkeypatch.setattr("lora_bench.engine.row_profiles.MOST_PROFILES", 2)
    why = {("saved_head", "plain"): "plain changes the head beside the head rows of saved_head", ("dora",): "",
           ("dora", "plain"): "", ("plain", "dora", "dora_qv"): "dora_qv has DoRA where dora acts before it, which has DoRA or follows one"}
    for names, path in why.items():
        bench.submit(1, TokenIds(random_ids(5)), _mix(names, lambda: 1.0), max_tokens=3)
        bench.run()
        assert [step.path for step in bench.of(StepFinished)][1:] == [f"eager: {path}" if path else "graph"] * 2
        bench.events.clear()
    for number in range(3):
        bench.submit(number, TokenIds(random_ids(5)), (AdapterUse("dora", 0.1 * (number + 1)),), max_tokens=5)
    bench.run()
    assert bench.of(StepFinished)[-1].path == "eager: 3 mixes with DoRA, trained biases or norms act, at most 2 do in a graph"
    bench.drawn.clear()
    for number in range(5):  # each takes the place of the one before last
        mix = (AdapterUse("dora", 0.2 + number),)
        bench.submit(number + 3, TokenIds(random_ids(5)), mix, max_tokens=3)
        bench.run()
        for _, ids, logits in bench.drawn[-2:]:
            expected = bench.engine.logits(ids, mix)
            assert (logits[: len(expected)] - expected).norm() <= 1e-5 * expected.norm(), number
    assert len(bench.drawn) >= 10


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_packed_bases_draw_what_dense_ones_would(kind: str, device: str, tmp_path: Path, endless: None, seed: int) -> None:
    """Each token is the best of the dense base on the CPU, or close to it by what 16 bits round. DoRA is at the gate, too."""
    base = write_gguf(tmp_path / "m.gguf", {"v_proj": "Q6_K", "": kind}, np.random.default_rng(seed), spread=0.05)
    cpu, cuda = Bench(base, weights="dense"), Bench(base, weights="packed", device=device, dtype="bf16")
    for name in ("dora", "plain"):
        tensors, decoder = {}, cpu.engine.model.runner.decoder
        for module, (d_out, d_in) in module_shapes(FACTS).items():
            if module != "lm_head":
                path, (weight, first, end) = f"base_model.model.model.{module}", decoder.rows_of(module)
                tensors |= {f"{path}.lora_A.weight": torch.randn(4, d_in) / 16, f"{path}.lora_B.weight": torch.randn(d_out, 4) / 16}
                if name == "dora":
                    tensors[f"{path}.lora_magnitude_vector"] = weight[first:end].norm(dim=1) * (torch.rand(d_out) + 0.5)
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(
            {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP], "use_dora": name == "dora"}))
        for bench in (cpu, cuda):
            bench.engine.load_adapter(str(tmp_path / name), name)
    mixes = [_mix(names, lambda: 0.8) for names in (("dora",), ("plain",), ("dora", "plain"), ("dora",))]
    prompts = [random_ids(10 + number, seed + number) for number in range(len(mixes))]
    for number, (prompt, mix) in enumerate(zip(prompts, mixes, strict=True)):
        cuda.submit(number, TokenIds(prompt), mix, max_tokens=16 + 8 * number)
    cuda.run()
    assert not [event.problem for event in cuda.of(GraphCaptured) if event.problem]
    assert [event.path for event in cuda.of(StepFinished)].count("graph") > 30
    for number, (prompt, mix) in enumerate(zip(prompts, mixes, strict=True)):
        for place, token in enumerate(cuda.ids(number)):
            logits = cpu.engine.logits((*prompt, *cuda.ids(number)[:place]), mix)
            assert logits.max() - logits[token] < 0.15 * logits.std(), (number, place)

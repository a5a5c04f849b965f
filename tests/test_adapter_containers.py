"""What an adapter may come in beside PEFT's folder: parts, one file, a run's checkpoints, MLX.

And spellings of names, and other layouts of the base.
"""
from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_bench.engine.adapters.adapter import Adapter
from lora_bench.engine.adapters.card import MAX_KEYS, MAX_VALUE, read_card
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.family import family
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import CONTAINERS, is_adapter, open_adapter
from lora_bench.engine.adapters.peft import CONFIG, SAFETENSORS
from lora_bench.engine.inspect import inspect_path
from lora_bench.engine.models.facts import ModelFacts, module_shapes

Folder = Callable[..., Path]


@pytest.fixture
def load(tiny_facts: ModelFacts) -> Callable[[Path], Adapter]:
    return lambda path: load_adapter(open_adapter(path), tiny_facts, "it")


def renamed(folder: Path, rename: Callable[[str], str]) -> Path:
    tensors = load_file(folder / SAFETENSORS)
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / SAFETENSORS)
    return folder


# -- names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("rename", [
    lambda name: name.removeprefix("base_model.model."),
    lambda name: name.removeprefix("base_model.model.model."),
    lambda name: name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."),
    lambda name: name.replace("model.model.", "model.model.language_model."),
    lambda name: name.replace("model.model.", "model.language_model.model."),
    lambda name: f"module.{name}",
    lambda name: f"_orig_mod.{name}",
    lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    lambda name: name.replace(".self_attn.", "._fsdp_wrapped_module.self_attn._checkpoint_wrapped_module."),
    lambda name: name.replace(".lora_", ".base_layer.lora_"),
])
def test_spellings_of_one_name(adapter_folder: Folder, load: Callable[[Path], Adapter], rename: Callable[[str], str]) -> None:
    patterns = {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {r"layers\.1\.self_attn\.v_proj": 4}}
    folder = adapter_folder("plain", **patterns)
    plain = load(folder)
    spelled = adapter_folder("spelled", tensors=load_file(folder / SAFETENSORS), **patterns)
    info = load(renamed(spelled, rename)).info
    assert (info.digest, info.matched, info.unmatched) == (plain.info.digest, 4, ())


def test_another_models_layer_is_not_this_ones_last_norm(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    tensors = load_file(adapter_folder("plain") / SAFETENSORS)
    tower = tensors | {"base_model.model.vision_tower.layers.0.norm.weight": torch.ones(3),
                       "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 7),
                       "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(7, 4)}
    info = load(adapter_folder("tower", tensors=tower, modules_to_save=["layers.0.norm"])).info
    assert info.matched == 4 and info.total == 5 and len(info.unmatched) == 2 and not info.replaced
    with pytest.raises(AdapterError, match="has no place in the base"):
        load(adapter_folder("other", tensors=tensors | {"base_model.model.model.layers.0.mlp.norm.weight": torch.ones(24)}))


# -- layouts -------------------------------------------------------------------------------------
def _delta(adapter: Adapter, module: str) -> Tensor:
    pair = adapter.modules[module]
    return pair.scaling * (pair.b.float() @ pair.a.float())


@pytest.mark.parametrize("config", [{}, {"alpha_pattern": {"k_proj": 1, "up_proj": 7}}, {"lora_bias": True}, {"use_dora": True}], ids=str)
def test_split_on_fused_and_back(adapter_folder: Folder, tiny_facts: ModelFacts, config: dict[str, object]) -> None:
    targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    folder = adapter_folder("split", targets, **config)
    tensors = load_file(folder / SAFETENSORS)
    for name, tensor in list(tensors.items()):
        if name.endswith("lora_B.weight") and config.keys() & {"lora_bias", "use_dora"}:
            end = "lora_B.bias" if "lora_bias" in config else "lora_magnitude_vector"
            tensors[name.replace("lora_B.weight", end)] = torch.rand(tensor.shape[0])
    save_file(tensors, folder / SAFETENSORS)
    split = load_adapter(open_adapter(folder), tiny_facts, "it")
    fused = load_adapter(open_adapter(folder), dataclasses.replace(tiny_facts, fused=True), "it")
    assert {name.split(".", 2)[2] for name in fused.modules} == {"self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    for whole, parts in (("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")), ("mlp.gate_up_proj", ("gate_proj", "up_proj"))):
        room = whole.split(".")[0]
        names = [f"layers.1.{room}.{part}" for part in parts]
        pair = fused.modules[f"layers.1.{whole}"]
        torch.testing.assert_close(_delta(fused, f"layers.1.{whole}"), torch.cat([_delta(split, name) for name in names]))
        if "lora_bias" in config:
            torch.testing.assert_close(pair.scaling * pair.bias,
                                       torch.cat([split.modules[n].scaling * split.modules[n].bias for n in names]))
        if "use_dora" in config:
            assert torch.equal(pair.magnitude, torch.cat([split.modules[name].magnitude for name in names]))


def test_fused_on_split(adapter_folder: Folder, tiny_facts: ModelFacts) -> None:
    shapes = module_shapes(dataclasses.replace(tiny_facts, fused=True))
    tensors = {}
    for module in ("layers.0.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj"):
        d_out, d_in = shapes[module]
        tensors |= {f"base_model.model.model.{module}.lora_A.weight": torch.randn(4, d_in),
                    f"base_model.model.model.{module}.lora_B.weight": torch.randn(d_out, 4)}
    folder = adapter_folder("fused", tensors=tensors, target_modules=["qkv_proj", "gate_up_proj"])
    adapter = load_adapter(open_adapter(folder), tiny_facts, "it")
    fused = [f"layers.0.self_attn.{part}_proj" for part in "kqv"] + [f"layers.1.mlp.{part}_proj" for part in ("gate", "up")]
    assert sorted(adapter.modules) == fused
    b = tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"]
    assert torch.equal(torch.cat([adapter.modules[f"layers.0.self_attn.{part}_proj"].b for part in "qkv"]), b)
    assert adapter.info.matched == adapter.info.total == 2
    both = tensors | {name.replace("qkv_proj", "q_proj"): tensor[:36].clone() if "lora_B" in name else tensor.clone()
                      for name, tensor in tensors.items() if "qkv" in name}
    with pytest.raises(AdapterError, match="qkv_proj and for .*q_proj, which is a part of it"):
        load_adapter(open_adapter(adapter_folder("both", ("qkv_proj", "gate_up_proj", "q_proj"), tensors=both)), tiny_facts, "it")
    for facts in (tiny_facts, dataclasses.replace(tiny_facts, fused=True)):
        whole = tensors | {f"base_model.model.model.layers.0.self_attn.{'q' if facts.fused else 'qkv'}_proj.weight": torch.ones(3, 24)}
        with pytest.raises(AdapterError, match="a whole linear that the base has fused or split"):
            load_adapter(open_adapter(adapter_folder("whole", tensors=whole)), facts, "it")


def test_a_part_of_a_fused_module_alone(adapter_folder: Folder, tiny_facts: ModelFacts) -> None:
    fused = dataclasses.replace(tiny_facts, fused=True)
    folder = adapter_folder("v", ("v_proj",))
    delta = _delta(load_adapter(open_adapter(folder), fused, "it"), "layers.0.self_attn.qkv_proj")
    split = load_adapter(open_adapter(folder), tiny_facts, "it")
    assert not delta[:48].any() and torch.equal(delta[48:], _delta(split, "layers.0.self_attn.v_proj"))
    tensors = load_file(folder / SAFETENSORS)
    tensors |= {name.replace("lora_B.weight", "lora_magnitude_vector"): torch.ones(12) for name in tensors if "lora_B" in name}
    with pytest.raises(AdapterError, match="DoRA on a part of layers.0.self_attn.qkv_proj"):
        load_adapter(open_adapter(adapter_folder("dora", ("v_proj",), tensors=tensors, use_dora=True)), fused, "it")


def test_norms_that_lack_a_constant_in_hugging_face_files(adapter_folder: Folder, tiny_facts: ModelFacts) -> None:
    norms = {f"base_model.model.model.{name}.weight": torch.randn(24).bfloat16() for name in ("norm", "layers.1.input_layernorm")}
    folder = adapter_folder("n", tensors=load_file(adapter_folder("a") / SAFETENSORS) | norms, modules_to_save=["norm", "input_layernorm"])
    replaced = load_adapter(open_adapter(folder), dataclasses.replace(tiny_facts, norm_offset=1.0), "it").weights.replaced
    for name, tensor in norms.items():
        assert torch.equal(replaced[name.removeprefix("base_model.model.model.")], tensor.float() + 1)


# -- containers ----------------------------------------------------------------------------------
def test_parts(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    folder = adapter_folder("a")
    digest = load(folder).info.digest
    tensors = list(load_file(folder / SAFETENSORS).items())
    (folder / SAFETENSORS).unlink()
    for number, part in enumerate((tensors[:3], tensors[3:]), 1):
        save_file(dict(part), folder / f"adapter_model-{number:05}-of-00002.safetensors")
    assert load(folder).info.digest == digest
    save_file(dict(tensors[:4]), folder / "adapter_model-00001-of-00002.safetensors")
    with pytest.raises(AdapterError, match="is also in another of the 2 files"):
        load(folder)
    (folder / "adapter_model-00001-of-00002.safetensors").unlink()
    with pytest.raises(AdapterError, match="holds 1 of the 2 files"):
        load(folder)


@pytest.mark.parametrize("metadata", [
    {"adapter_config": json.dumps({"r": 4, "lora_alpha": 6})},
    {"adapter_config.json": json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6})},
    {"rank": "4", "alpha": "6"}, {"lora_alpha": "6.0"}, {"ss_network_dim": "4", "ss_network_alpha": "6"},
])
def test_one_file_with_metadata(adapter_folder: Folder, load: Callable[[Path], Adapter], tmp_path: Path, metadata: dict[str, str]) -> None:
    folder = adapter_folder("a", r=4, lora_alpha=6)
    digest = load(folder).info.digest
    path = tmp_path / "alone" / "pirate.safetensors"
    path.parent.mkdir()
    save_file(load_file(folder / SAFETENSORS), path, metadata=metadata | {"format": "pt"})
    info = load(path).info
    assert (info.digest, info.format, info.metadata["format"]) == (digest, "safetensors with metadata", "pt")
    assert open_adapter(path).default_name == "pirate" and is_adapter(path) and inspect_path(path)["effective_scales"] == [1.5]


@pytest.mark.parametrize(("metadata", "words"), [
    ({}, "nothing says alpha"), ({"format": "pt", "rank": "4"}, "nothing says alpha"), ({"alpha": "many"}, "alpha is 'many'"),
    ({"alpha": "nan"}, "alpha"), ({"alpha": "1", "rank": "5"}, "rank 5"), ({"alpha": "1", "rank": "4.5"}, "rank"),
    ({"adapter_config": "{"}, "adapter_config.*cannot be read"), ({"adapter_config": '{"use_qalora": true}'}, "QA-LoRA"),
])
def test_one_file_that_does_not_say_enough(
    adapter_folder: Folder, load: Callable[[Path], Adapter], tmp_path: Path, metadata: dict[str, str], words: str,
) -> None:
    path = tmp_path / "alone.safetensors"
    save_file(load_file(adapter_folder("a") / SAFETENSORS), path, metadata=metadata)
    with pytest.raises(AdapterError, match=words) as refused:
        load(path)
    assert "\n" not in str(refused.value)


def test_checkpoints_of_a_run(adapter_folder: Folder, load: Callable[[Path], Adapter], tmp_path: Path) -> None:
    for step in (500, 1000, 90):
        adapter_folder(f"run/checkpoint-{step}", lora_alpha=step)
    run = tmp_path / "run"
    for other in ("checkpoint-2000", "checkpoint-x", "logs"):
        (run / other).mkdir()
    info = load(run).info
    assert info.path == str(run / "checkpoint-1000")
    assert info.effective_scales == (250.0,) and any("checkpoint-1000 is opened, the newest of 3 checkpoints" in note
                                                     for note in info.notes)
    assert open_adapter(run).default_name == "run-checkpoint-1000" and is_adapter(run)
    assert [member.step for member in family(run)] == [90, 500, 1000] == [member.step for member in family(run / "checkpoint-90" / CONFIG)]
    adapter_folder("run", lora_alpha=1)
    assert [member.step for member in family(run / "checkpoint-500")] == [90, 500, 1000, None]
    assert load(run).info.effective_scales == (0.25,)
    assert family(tmp_path) == []


def test_an_entry_of_the_cache(adapter_folder: Folder, load: Callable[[Path], Adapter], tmp_path: Path) -> None:
    entry = tmp_path / "models--me--pirate"
    for name, alpha in (("aaa", 1), ("bbb", 2)):
        adapter_folder(f"models--me--pirate/snapshots/{name}", lora_alpha=alpha)
    (entry / "snapshots" / "ccc").mkdir()
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("aaa")
    assert is_adapter(entry) and load(entry).info.effective_scales == (0.25,) and open_adapter(entry).default_name == "pirate"
    (entry / "refs" / "main").write_text("ccc")
    os.utime(entry / "snapshots" / "aaa", (1, 1))
    assert load(entry).info.effective_scales == (0.5,)


def write_mlx(folder: Path, facts: ModelFacts, config: dict[str, object], magnitude: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    shapes = module_shapes(facts) | {"embed_tokens": (facts.hidden, facts.vocab)}
    pairs = {name: (torch.randn(3, shape[1]), torch.randn(shape[0], 3)) for name, shape in shapes.items() if "k_proj" not in name}
    tensors = {}
    for name, (a, b) in pairs.items():
        path = name if name == "lm_head" else f"model.{name}"
        tensors |= {f"{path}.lora_a": a.T.contiguous(), f"{path}.lora_b": b.T.contiguous()}
        if magnitude and name != "embed_tokens":
            tensors[f"{path}.m"] = torch.rand(b.shape[0])
    folder.mkdir()
    save_file(tensors, folder / "adapters.safetensors", metadata={"format": "mlx"})
    (folder / CONFIG).write_text(json.dumps(config))
    return pairs


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_mlx(tiny_facts: ModelFacts, load: Callable[[Path], Adapter], tmp_path: Path, seed: int, kind: str) -> None:
    config = {"fine_tune_type": kind, "num_layers": 2, "model": "tiny/base", "lora_parameters": {"rank": 3, "scale": 20.0, "dropout": 0.0}}
    pairs = write_mlx(tmp_path / "mlx", tiny_facts, config, magnitude=kind == "dora")
    if kind == "dora":  # rows of a DoRA embedding have lengths of their own in MLX, not the columns as in PEFT
        tensors = load_file(tmp_path / "mlx" / "adapters.safetensors")
        save_file({name: t for name, t in tensors.items() if "embed" not in name}, tmp_path / "mlx" / "adapters.safetensors")
        pairs.pop("embed_tokens")
    adapter = load(tmp_path / "mlx")
    found = dict(adapter.modules) | ({"embed_tokens": adapter.weights.embedding} if adapter.weights.embedding else {})
    assert found.keys() == pairs.keys() and adapter.info.effective_scales == (20.0,) and adapter.info.base_model == "tiny/base"
    for name, (a, b) in pairs.items():
        assert torch.equal(found[name].a, a) and torch.equal(found[name].b, b)
        assert (found[name].magnitude is not None) == (kind == "dora")
    assert load(tmp_path / "mlx" / "adapters.safetensors").info.digest == adapter.info.digest
    assert inspect_path(tmp_path / "mlx")["effective_scales"] == [20.0]


@pytest.mark.parametrize(("config", "words"), [
    ({"fine_tune_type": "full"}, "fine_tune_type \"full\""), ({"lora_parameters": {"rank": 3}}, "scale is null"),
    ({"lora_parameters": {"rank": 3, "scale": "x"}}, "scale"), ({"lora_parameters": {"rank": 3, "alpha": 8, "scale": 2}}, "has alpha"),
    ({"lora_parameters": {"rank": 3, "scale": 2}, "fine_tune_type": "dora"}, "no magnitude"),
])
def test_mlx_that_is_not_understood(
    tiny_facts: ModelFacts, load: Callable[[Path], Adapter], tmp_path: Path, seed: int, config: dict[str, object], words: str,
) -> None:
    write_mlx(tmp_path / "mlx", tiny_facts, config)
    with pytest.raises(AdapterError, match=words):
        load(tmp_path / "mlx")


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    with pytest.raises(AdapterError, match="looks like a base model"):
        open_adapter(tmp_path / "base")
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "x.gguf").touch()
    with pytest.raises(AdapterError, match="holds 'x.gguf': give that file"):
        open_adapter(tmp_path / "quant")
    assert not is_adapter(tmp_path / "base") and not is_adapter(tmp_path / "quant")
    assert all(CONTAINERS.values())


# -- what it says of itself ----------------------------------------------------------------------
CARD = """---
base_model: "meta/tiny"
license: apache-2.0
tags:
- lora
- 'pirate'
language: [en, de]
library_name: peft
model-index:
  - name: x
    results: []
nothing:
---
# Title
license: other
"""


def test_a_model_card(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    folder = adapter_folder("a")
    (folder / "README.md").write_text(CARD)
    card = {"base_model": "meta/tiny", "license": "apache-2.0", "tags": "lora, pirate", "language": "en, de", "library_name": "peft"}
    assert read_card(folder) == card == load(folder).info.card == inspect_path(folder)["card"]


@pytest.mark.parametrize("text",
                         ["", "---", "---\n", "no front matter", "---\nlicense: x", "\xff\xfe", "---\n: :\n- a\n  b\n---\n", "---\n---\n"])
def test_cards_that_say_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_bytes(text.encode("latin-1"))
    assert read_card(tmp_path) == {}


def test_cards_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\n" + "".join(f"key{i}: {'v' * 5000}\n" for i in range(30)) + "---\n")
    assert len(read_card(tmp_path)) == 0  # longer than what is read
    (tmp_path / "README.md").write_text("---\n" + "".join(f"key{i}: {'v' * 400}\n" for i in range(100)) + "---\n")
    card = read_card(tmp_path)
    assert len(card) == MAX_KEYS and all(len(value) == MAX_VALUE + 1 for value in card.values())
    (tmp_path / "README.md").unlink()
    os.mkfifo(tmp_path / "README.md")
    assert read_card(tmp_path) == {}


def test_its_own_tokenizer_is_named(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    tensors = load_file(adapter_folder("a") / SAFETENSORS) | {"base_model.model.model.embed_tokens.weight": torch.randn(52, 24),
                                                              "base_model.model.lm_head.weight": torch.randn(52, 24)}
    more = adapter_folder("b", tensors=tensors)
    assert any("no tokenizer.json" in note for note in load(more).info.notes)
    (more / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 50, "content": "<x>"}, {"id": 51, "content": "<y>"}]}))
    adapter = load(more)
    assert adapter.weights.tokenizer_json == more / "tokenizer.json" and adapter.info.added_rows == 2
    assert not any("no tokenizer.json" in note for note in adapter.info.notes)

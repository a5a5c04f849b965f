"""Where an adapter acts: what PEFT makes of the same config and file, for every field that chooses modules."""
from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
from peft_files import BIASED, PLAIN, TIED, compare, edit, llama, trained
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_bench.engine.adapters.adapter import Adapter
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.keys import PairNames, TensorNames
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.match import match
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.adapters.peft import CONFIG, SAFETENSORS
from lora_bench.engine.adapters.where import DEFAULT_TARGETS, within
from lora_bench.engine.models import ARCHITECTURES_CONFIG, WRAPPED
from lora_bench.engine.models.facts import ModelFacts, module_shapes

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice on configs that are odd on purpose
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EVERYWHERE = [*LINEARS, "embed_tokens", "lm_head"]
HEAD = "base_model.model.lm_head"


def modules_of(adapter: Adapter) -> set[str]:
    return {*adapter.modules, *(["embed_tokens"] if adapter.weights.embedding else [])}


CHOICES = {
    "list": {"target_modules": ["q_proj", "down_proj"]},
    "whole names": {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.mlp.up_proj", "lm_head"]},
    "no part of a name": {"target_modules": ["proj", "q_proj"]},
    "expression": {"target_modules": r"model\.layers\.[1-9]\.(mlp|self_attn)\.(up|v)_proj"},
    "expression of part of a name": {"target_modules": r".*\.(q|v)_proj|lm_head"},
    "all-linear": {"target_modules": "All-Linear"},
    "excluded": {"exclude_modules": ["k_proj", "layers.1.mlp.up_proj", "self_attn"]},
    "excluded by expression": {"exclude_modules": r".*\.0\..*|lm_head"},
    "all-linear, excluded": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "one layer": {"layers_to_transform": 1},
    "layers": {"layers_to_transform": [0, 9], "layers_pattern": ["h", "layers"]},
    "layers and whole names": {"target_modules": ["model.layers.1.self_attn.q_proj", "v_proj"], "layers_to_transform": [0]},
    "beside whole tensors": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    "absent": {"target_modules": None},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["up_proj.weight", "model.layers.0.mlp.down_proj.weight"]},
    "parameters are never excluded": {"target_modules": ["q_proj"], "target_parameters": ["up_proj.weight"],
                                      "exclude_modules": ["up_proj"]},
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_file_with_more_than_its_config_covers_acts_as_in_peft(seed: int, tmp_path: Path, case: str) -> None:
    changes = CHOICES[case]
    trained(llama(PLAIN), tmp_path, target_modules=EVERYWHERE)

    def as_saved(tensors: dict[str, Tensor]) -> None:
        if "modules_to_save" in changes:
            tensors[f"{HEAD}.weight"] = tensors.pop(f"{HEAD}.base_layer.weight") + 1

    adapter = compare(edit(tmp_path, as_saved, **changes), PLAIN)
    info = adapter.info
    assert 0 < info.matched < info.total and info.outside == info.total - info.matched
    notes = [note for note in info.notes if "as in PEFT they do not act" in note]
    fields = {"target_modules", "exclude_modules", "layers_to_transform", "modules_to_save"}
    named = {field for note in notes for field in fields if note.startswith(field)}
    assert notes and named and named <= {*changes, "target_modules"}


@pytest.mark.parametrize(("config", "tying"),
                         [(EVERYWHERE, True), (["lm_head", "q_proj"], True), (".*q_proj|lm_head", True), (["q_proj"], True),
                                               (["embed_tokens"], False)], ids=str)
def test_a_tied_head_is_covered_as_peft_covers_it(seed: int, tmp_path: Path, config: object, tying: bool) -> None:
    trained(llama(TIED), tmp_path, target_modules=EVERYWHERE, ensure_weight_tying=tying)
    compare(edit(tmp_path, target_modules=config), TIED)


def whole(**tensors: tuple[int, ...]) -> dict[str, Tensor]:
    return {f"base_model.model.{name.replace('__', '.')}": torch.randn(shape) for name, shape in tensors.items()}


STRAY: dict[str, tuple[ModelFacts, dict[str, object], dict[str, tuple[int, ...]], bool]] = {
    "a norm that is not listed": (PLAIN, {}, {"model__norm__weight": (24,)}, True),
    "a head that is not listed": (PLAIN, {}, {"lm_head__weight": (50, 24)}, True),
    "a head below no LoRA": (PLAIN, {}, {"lm_head__base_layer__weight": (50, 24)}, False),
    "a head below a LoRA": (PLAIN, {"target_modules": ["lm_head"]}, {"lm_head__base_layer__weight": (50, 24)}, True),
    "a saved head that is not listed": (PLAIN, {}, {"lm_head__modules_to_save__weight": (50, 24)}, False),
    "a bias beside a LoRA": (BIASED, {}, {"model__layers__0__self_attn__q_proj__bias": (36,)}, False),
    "a bias below a LoRA": (BIASED, {}, {"model__layers__0__self_attn__q_proj__base_layer__bias": (36,)}, True),
    "a bias without a LoRA": (BIASED, {}, {"model__layers__0__self_attn__k_proj__bias": (12,)}, True),
    "a bias below no LoRA": (BIASED, {}, {"model__layers__0__self_attn__k_proj__base_layer__bias": (12,)}, False),
    "an embedding beside trained rows": (PLAIN, {"trainable_token_indices": [3]}, {"model__embed_tokens__weight": (50, 24)}, False),
    "an embedding below trained rows": (
        PLAIN, {"trainable_token_indices": [3]}, {"model__embed_tokens__token_adapter__base_layer__weight": (50, 24)}, True),
    "a tied embedding": (TIED, {}, {"model__embed_tokens__weight": (50, 24)}, True),
}


@pytest.mark.parametrize("case", STRAY)
def test_whole_tensors_act_where_peft_has_a_place_for_them(seed: int, tmp_path: Path, case: str) -> None:
    facts, config, tensors, acts = STRAY[case]
    trained(llama(facts), tmp_path, **config)
    adapter = compare(edit(tmp_path, lambda held: held.update(whole(**tensors))), facts)
    assert bool(adapter.weights.replaced) == acts
    assert any("does not act, as in PEFT" in note for note in adapter.info.notes) == (not acts)


def test_a_head_beside_a_lora_does_not_act(seed: int, tmp_path: Path) -> None:
    trained(llama(PLAIN), tmp_path, target_modules=["lm_head"])
    adapter = compare(edit(tmp_path, lambda held: held.update({f"{HEAD}.weight": held.pop(f"{HEAD}.base_layer.weight") + 1})), PLAIN)
    assert not adapter.weights.replaced and any("beside which PEFT reads base_layer alone" in note for note in adapter.info.notes)


def test_twenty_names_and_layers_contradict_each_other(seed: int, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.{kind}.{name}" for layer in range(2) for name in LINEARS for kind in ("self_attn", "mlp")]
    trained(llama(PLAIN), tmp_path, target_modules=LINEARS)
    folder = edit(tmp_path, target_modules=names, layers_to_transform=[0])
    with pytest.raises(AdapterError, match="target_modules names layers.1.*layers_to_transform leaves out its layer"):
        load_adapter(open_adapter(folder), PLAIN, "it")
    assert compare(edit(folder, layers_to_transform=None), PLAIN).info.outside == 0
    assert compare(edit(folder, target_modules=names[:14], layers_to_transform=[1]), PLAIN).info.matched == 7


def test_what_peft_refuses_is_refused(adapter_folder: Callable[..., Path], tiny_facts: ModelFacts) -> None:
    for config in ({"target_modules": ".*q_proj", "layers_to_transform": [0]},
                   {"target_modules": "all-linear", "layers_pattern": "layers"}):
        with pytest.raises(AdapterError, match=r"layers_(to_transform|pattern) is .* beside .* in target_modules"):
            load_adapter(open_adapter(adapter_folder("a", **config)), tiny_facts, "it")
    with pytest.raises(AdapterError, match="target_modules is absent.*no default for granite"):
        load_adapter(open_adapter(adapter_folder("b", target_modules=None)), replace(tiny_facts, architecture="granite"), "it")
    with pytest.raises(AdapterError, match=r"layers_pattern is .*\(a\+\)\+"):
        load_adapter(open_adapter(adapter_folder("c", layers_to_transform=[0], layers_pattern="(a+)+")), tiny_facts, "it")
    with pytest.raises(AdapterError, match="backtracks without end"):
        load_adapter(open_adapter(adapter_folder("d", target_modules="(.*.*.*.*.*.*.*.*)*x$")), tiny_facts, "it")


def test_defaults_are_those_of_peft() -> None:
    ours = {name: list(targets) for name, targets in DEFAULT_TARGETS.items() if name != "gemma3"}  # as its GGUF files call gemma3_text
    assert {name: DEFAULTS[name] for name in ARCHITECTURES_CONFIG if name in DEFAULTS} == ours and not WRAPPED.keys() & DEFAULTS.keys()


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_a_list_chooses_whatever_the_prefix_and_an_expression_as_it_stands(
    adapter_folder: Callable[..., Path], tiny_facts: ModelFacts, prefix: str,
) -> None:
    tensors = {name.replace("base_model.model.model.", f"base_model.model.{prefix}"): tensor
               for name, tensor in load_file(adapter_folder("plain") / SAFETENSORS).items()}

    def chosen(**config: object) -> set[str]:
        return modules_of(load_adapter(open_adapter(adapter_folder("it", tensors=tensors, **config)), tiny_facts, "it"))

    v = {"layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj"}
    assert chosen(target_modules=["v_proj"]) == chosen(exclude_modules=["q_proj"]) == v
    assert chosen(target_modules=".*(?:language|layers).*v_proj") == v
    assert chosen(target_modules=[f"model.language_model.{name}" for name in v]) == v
    assert chosen(target_modules=[f"model.{name}" for name in v]) == v
    assert chosen(target_modules=prefix.replace(".", r"\.") + r"layers\.\d\.self_attn\.v_proj") == v
    assert chosen(layers_to_transform=[0]) == {"layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"}
    with pytest.raises(AdapterError, match="target_modules"):
        chosen(target_modules=[f"vision_tower.encoder.{name}" for name in v])
    with pytest.raises(AdapterError, match="target_modules"):
        chosen(target_modules="other." + prefix.replace(".", r"\.") + r"layers\.\d\.self_attn\.v_proj")


def test_files_without_such_a_config_act_whole(adapter_folder: Callable[..., Path], tiny_facts: ModelFacts, tmp_path: Path) -> None:
    tensors = load_file(adapter_folder("plain") / SAFETENSORS)
    for metadata, matched in (({"lora_alpha": "8"}, 4), ({"adapter_config": json.dumps({"r": 4})}, 4),
                              ({"adapter_config": json.dumps({"r": 4, "target_modules": ["q_proj"]})}, 2)):
        save_file(tensors, tmp_path / "one.safetensors", metadata=metadata)
        assert load_adapter(open_adapter(tmp_path / "one.safetensors"), tiny_facts, "it").info.matched == matched


def test_a_tensor_that_does_not_act_need_not_fit(adapter_folder: Callable[..., Path], tiny_facts: ModelFacts) -> None:
    tensors = {name: tensor[:, :3].contiguous() if "v_proj" in name else tensor
               for name, tensor in load_file(adapter_folder("a") / SAFETENSORS).items()}
    assert load_adapter(open_adapter(adapter_folder("b", tensors=tensors, target_modules=["q_proj"])), tiny_facts, "it").info.matched == 2


# -- any config ----------------------------------------------------------------------------------
def _random_fields(rng: random.Random, paths: list[str]) -> dict[str, object]:
    names = [*EVERYWHERE, "self_attn", "mlp", "layers", "proj", "norm", "1.mlp.up_proj", "layers.2.self_attn.q_proj", *rng.sample(paths, 3)]
    expressions = [r".*_proj", r".*\.(q|k)_proj", r"model\.layers\.[02]\..*", "lm_head", r".*(embed_tokens|head)", r"(?i).*UP_proj",
                   "q_proj", ".*1.*"]
    fields: dict[str, object] = {"target_modules": rng.choice([rng.sample(names, rng.randint(1, 6)), rng.choice(expressions)])}
    if rng.random() < 0.5:
        fields["exclude_modules"] = rng.choice([rng.sample(names, rng.randint(1, 3)), rng.choice(expressions)])
    if isinstance(fields["target_modules"], list) and rng.random() < 0.4:
        fields["layers_to_transform"] = rng.choice([0, [1, 2], [], [5], -1])
        fields["layers_pattern"] = rng.choice([None, "layers", ["h", "layers"], "h", "l.yers", []])
    if rng.random() < 0.3:
        fields["modules_to_save"] = rng.sample(["lm_head", "embed_tokens", "self_attn", "q.proj", "layers.1", "head"], 2)
    return fields


def test_random_fields_cover_what_peft_says(seed: int, adapter_folder: Callable[..., Path]) -> None:
    rng = random.Random(seed)
    facts = replace(PLAIN, layers=4)
    paths = {("" if module == "lm_head" else "model.") + module: module for module in (*module_shapes(facts), "embed_tokens")}
    folder, refused = adapter_folder("a"), 0
    for _ in range(60):
        fields = _random_fields(rng, list(paths))
        (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | fields))
        config = LoraConfig(**fields)
        expected = {module for path, module in paths.items() if check_target_module_exists(config, path)}
        file = open_adapter(folder)
        pairs = tuple(PairNames(path, "a", "b", embedding=module == "embed_tokens") for path, module in paths.items())
        places = match(TensorNames(pairs), facts, file.weights_path)
        try:
            kept = within(places, facts, file)
        except AdapterError:
            assert not expected, fields
            refused += 1
        else:
            assert kept.pairs.keys() == expected and len(kept.outside) == len(paths) - len(expected), fields
    assert refused < 60


def test_injected_layers_are_those_that_act(seed: int, tmp_path: Path) -> None:
    """The rule as a whole model applies it, with names shortened: more than CONDENSED of them."""
    rng = random.Random(seed)
    facts = replace(PLAIN, layers=4)
    base = llama(facts)
    names = [path for path, _ in base.named_modules() if path.endswith("_proj")]
    get_peft_model(llama(facts), LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False)).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(base, edit(tmp_path, target_modules=rng.sample(names, 23), exclude_modules=["k_proj"]))
    injected = {path.removeprefix("base_model.model.model.") for path, module in model.named_modules() if hasattr(module, "lora_A")}
    assert modules_of(load_adapter(open_adapter(tmp_path), facts, "it")) == injected

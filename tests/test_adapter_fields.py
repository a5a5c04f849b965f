"""Every field of PEFT's LoraConfig: its verdict, and what is read from the adapters that PEFT saves with it, against PEFT."""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft_files import BIASED, PLAIN, TIED, acted, compare, edit, llama, logits, trained
from torch import Tensor

from lora_bench.engine.adapters.config import parse_settings
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.fields import FIELDS, field_table, refusal, verdicts
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.adapters.peft import CONFIG
from lora_bench.engine.models.facts import ModelFacts

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' advice on configs that are odd on purpose
BOTH = ["embed_tokens", "lm_head"]
NORMS = ["input_layernorm", "norm"]


CASES = {
    "plain": (PLAIN, {}),
    "rslora": (PLAIN, {"use_rslora": True}),
    "patterns": (PLAIN, {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r".*\.1\..*": 3}}),
    "all-linear": (PLAIN, {"target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
    "regex": (PLAIN, {"target_modules": r".*layers\.[01]\.(mlp|self_attn)\.(up|v)_proj"}),
    "some layers": (PLAIN, {"target_modules": ["v_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
    "dora": (PLAIN, {"use_dora": True, "target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "dora, rslora": (PLAIN, {"use_dora": True, "use_rslora": True}),
    "lora_bias": (BIASED, {"lora_bias": True, "target_modules": ["q_proj", "up_proj"]}),
    "bias all": (BIASED, {"bias": "all"}),
    "bias lora_only": (BIASED, {"bias": "lora_only", "target_modules": ["o_proj", "gate_proj"]}),
    "whole embedding and head": (PLAIN, {"modules_to_save": BOTH}),
    "whole norms": (PLAIN, {"modules_to_save": NORMS}),
    "whole embedding, tied": (TIED, {"modules_to_save": ["embed_tokens"]}),
    "whole both, tied": (TIED, {"modules_to_save": BOTH}),
    "whole embedding, tied and to stay so": (TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "embedding": (PLAIN, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding and head": (PLAIN, {"target_modules": BOTH}),
    "head, tied": (TIED, {"target_modules": ["lm_head"]}),
    "embedding, tied": (TIED, {"target_modules": ["embed_tokens"]}),
    "embedding, tied and to stay so": (TIED, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "embedding, dora": (PLAIN, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "token rows": (PLAIN, {"trainable_token_indices": [7, 3, 49]}),
    "token rows by module": (PLAIN, {"trainable_token_indices": {"embed_tokens": [4, 2], "lm_head": [3]}}),
    "token rows, tied": (TIED, {"trainable_token_indices": [7, 3]}),
    "token rows by module, tied": (TIED, {"trainable_token_indices": {"embed_tokens": [2, 1], "lm_head": [2, 1]}}),
    "token rows apart, tied": (TIED, {"trainable_token_indices": {"embed_tokens": [2, 1], "lm_head": [3]}}),
    "parameters": (PLAIN, {"target_modules": ["v_proj"], "target_parameters": ["mlp.up_proj.weight"]}),
    "parameters, patterns": (PLAIN, {"target_modules": [], "target_parameters": ["q_proj.weight"],
                                     "rank_pattern": {r"0\.self_attn\.q_proj\.weight": 2},
                                     "alpha_pattern": {"self_attn.q_proj.weight": 9}}),
    "transposed, as PEFT corrects it": (PLAIN, {"fan_in_fan_out": True}),
    "orthogonal": (PLAIN, {"init_lora_weights": "orthogonal"}),
    "mica": (PLAIN, {"init_lora_weights": "mica"}),
    "repeats no layer": (PLAIN, {"layer_replication": [[0, 1], [1, 2]]}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_acts_as_in_peft(seed: int, tmp_path: Path, case: str) -> None:
    facts, config = CASES[case]
    trained(llama(facts), tmp_path, **config)
    info = compare(tmp_path, facts).info
    assert info.matched == info.total and not info.unmatched and not any("changes nothing" in note for note in info.notes)


@pytest.mark.parametrize(("facts", "config"), [
    (PLAIN, {}), (PLAIN, {"modules_to_save": BOTH}), (PLAIN, {"trainable_token_indices": [50, 51, 3]}), (PLAIN, {"target_modules": BOTH}),
    (TIED, {}), (TIED, {"modules_to_save": BOTH}), (TIED, {"trainable_token_indices": [50, 51, 3]}), (TIED, {"target_modules": BOTH}),
    (TIED, {"target_modules": ["embed_tokens", "q_proj"]}),
], ids=str)
def test_an_enlarged_vocabulary_comes_with_the_file(seed: int, tmp_path: Path, facts: ModelFacts, config: dict[str, object]) -> None:
    base = llama(facts)
    base.resize_token_embeddings(52)
    trained(base, tmp_path, {"save_embedding_layers": True}, **config)
    adapter = compare(tmp_path, facts)
    assert adapter.info.added_rows == 2 and adapter.weights.replaced["embed_tokens.weight"].shape == (52, 24)
    assert any("2 tokens more than the base" in note for note in adapter.info.notes)


def test_added_tokens_without_rows_in_the_head_are_said(seed: int, tmp_path: Path) -> None:
    base = llama(PLAIN)
    base.resize_token_embeddings(52)
    trained(base, tmp_path, {"save_embedding_layers": True}, target_modules=["embed_tokens"])
    assert any("read, never written" in note for note in load_adapter(open_adapter(tmp_path), PLAIN, "it").info.notes)


# -- what is refused -----------------------------------------------------------------------------
def test_every_field_of_peft_has_a_verdict() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields == set(FIELDS), f"fields of PEFT {peft.__version__} and ours: {fields ^ set(FIELDS)}"
    assert all(reason and verdict in ("honoured", "irrelevant", "refused") for _, verdict, reason in field_table())


def test_the_defaults_of_peft_are_honoured() -> None:
    defaults = LoraConfig().to_dict()
    assert not [name for name, value in defaults.items() if refusal(name, value)]
    assert {verdict.verdict for verdict in verdicts(json.loads(json.dumps(defaults, default=str)))} == {"honoured", "irrelevant"}


def test_text_is_no_flag() -> None:
    assert refusal("use_qalora", "false") and refusal("of tomorrow", True) and refusal("bias_of_tomorrow", "x")
    assert not refusal("of tomorrow", None) and not refusal("of tomorrow", []) and not refusal("use_qalora", False)


@pytest.mark.parametrize(("field", "value"), [
    ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "pissa"), ("init_lora_weights", "olora"), ("init_lora_weights", "corda"),
    ("init_lora_weights", "lora_ga"), ("init_lora_weights", "loftq"), ("init_lora_weights", "of tomorrow"), ("init_lora_weights", 3),
    ("use_qalora", True), ("use_bdlora", {"nblocks": 2}), ("arrow_config", {"top_k": 3}), ("megatron_config", {"a": 1}),
    ("kasa_config", {"beta": 1}), ("monteclora_config", {"num_samples": 4}), ("a_field_of_tomorrow", 7), ("peft_type", "IA3"),
    ("peft_type", "LOHA"), ("peft_type", "ADALORA"), ("bias", "some"), ("lora_bias", "yes"), ("use_dora", 1),
    ("layer_replication", [[0, 2], [1, 2]]), ("layer_replication", [[0, 1 << 40]]), ("layer_replication", "twice"),
    ("modules_to_save", ["lm_head"]), ("modules_to_save", "lm_head"), ("trainable_token_indices", [1]), ("trainable_token_indices", [1, 1]),
    ("trainable_token_indices", {"embed_tokens": [1], "a.embed_tokens": [2]}), ("trainable_token_indices", "all"),
    ("target_parameters", "experts"), ("invocation_string", "<|it|>"), ("peft_type", "ALORA"), ("layers_to_transform", "1"),
    ("layers_to_transform", [True]), ("layers_to_transform", [7]), ("layers_pattern", "layers"), ("exclude_modules", ["q_proj", "v_proj"]),
    ("exclude_modules", 3), ("exclude_modules", "(q"), ("exclude_modules", ".*(q|v)_proj"), ("target_modules", ["k_proj"]),
    ("target_modules", []),
    ("target_modules", ""), ("target_modules", ".*k_proj"), ("target_modules", "q_proj"), ("use_dora", True), ("lora_bias", True),
])
def test_what_would_not_act_as_trained_is_refused_by_name(
    adapter_folder: Callable[..., Path], tiny_facts: ModelFacts, field: str, value: object,
) -> None:
    with pytest.raises(AdapterError, match=field) as refused:
        load_adapter(open_adapter(adapter_folder("a", **{field: value})), tiny_facts, "it")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("field", "value"), [
    ("init_lora_weights", "gaussian"), ("init_lora_weights", False), ("init_lora_weights", "eva"), ("eva_config", {"rho": 2.0}),
    ("loftq_config", {"loftq_bits": 4}), ("corda_config", {"corda_method": "ipm"}), ("lora_dropout", 0.1), ("exclude_modules", ["k_proj"]),
    ("layers_to_transform", [0, 1]), ("layers_to_transform", []), ("layers_pattern", ""), ("invocation_string", None),
    ("a_field_of_tomorrow", None), ("task_type", "CAUSAL_LM"), ("modules_to_save", []), ("bias", None),
    ("trainable_token_indices", []), ("target_parameters", []), ("ensure_weight_tying", True), ("fan_in_fan_out", True),
])
def test_a_field_without_effect_is_no_obstacle(
    adapter_folder: Callable[..., Path], tiny_facts: ModelFacts, field: str, value: object,
) -> None:
    assert load_adapter(open_adapter(adapter_folder("a", **{field: value})), tiny_facts, "it").info.matched == 4


def test_an_older_alora_is_told_what_to_do(adapter_folder: Callable[..., Path], tiny_facts: ModelFacts) -> None:
    with pytest.raises(AdapterError, match=r"invocation_string.*alora_invocation_tokens.*token ids.*plain LoRA.*in the bench"):
        open_adapter(adapter_folder("text", invocation_string="<|start_of_role|>certainty<|end_of_role|>"))
    with pytest.raises(AdapterError, match=r"ALORA.*peft_type LORA.*alora_invocation_tokens"):
        open_adapter(adapter_folder("kind", peft_type="ALORA"))
    both = adapter_folder("both", invocation_string="ab", alora_invocation_tokens=[5, 6])
    assert load_adapter(open_adapter(both), tiny_facts, "it").info.invocation_tokens == (5, 6)
    assert {verdict.name: verdict.verdict
            for verdict in verdicts(json.loads((both / CONFIG).read_text()))}["invocation_string"] == "irrelevant"


@pytest.mark.parametrize(("config", "saved"), [
    ({"init_lora_weights": "pissa"}, "pissa"), ({"init_lora_weights": "olora"}, "olora")])
def test_a_changed_base_is_refused_until_it_is_converted(seed: int, tmp_path: Path, config: dict[str, object], saved: str) -> None:
    base = llama(PLAIN)
    untouched = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], **config))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = saved
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    expected = logits(model.eval(), PLAIN.vocab)
    model.save_pretrained(tmp_path / "raw")
    with pytest.raises(AdapterError, match="init_lora_weights.*changes the base.*path_initial_model_for_weight_conversion"):
        open_adapter(tmp_path / "raw")
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    weights = acted({name.removeprefix("model."): tensor for name, tensor in untouched.items()},
                    load_adapter(open_adapter(tmp_path / "converted"), PLAIN, "it").weights)
    ours = llama(PLAIN)
    ours.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in weights.items()})
    torch.testing.assert_close(logits(ours, PLAIN.vocab), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("facts", "config", "change", "words"), [
    (PLAIN, {"use_dora": True}, lambda t: t.pop(next(k for k in t if "magnitude" in k)), "use_dora is true but .* has no magnitude"),
    (PLAIN, {"use_dora": True}, lambda t: t.update({k: v[:-1] for k, v in t.items() if "magnitude" in k}),
     r"shape \[35\], expected \[36\]"),
    (BIASED, {"lora_bias": True}, lambda t: t.pop(next(k for k in t if "lora_B.bias" in k)), "lora_bias is true but"),
    (PLAIN, {"modules_to_save": BOTH}, lambda t: t.pop("base_model.model.lm_head.weight"), "modules_to_save lists 'lm_head'"),
    (PLAIN, {"modules_to_save": ["v_proj"]}, lambda t: None, "v_proj.* is a whole linear"),
    (PLAIN, {"modules_to_save": ["mlp"]}, lambda t: None, "mlp.* is a whole linear"),
    (PLAIN, {"modules_to_save": ["embed_tokens"]}, lambda t: t.update({"base_model.model.score.weight": torch.ones(2, 24)}),
     "score.* has no place in the base"),
    (PLAIN, {}, lambda t: t.update({"base_model.model.model.layers.0.self_attn.k_proj.bias": torch.ones(12)}),
     "bias of a module that has none"),
    (PLAIN, {}, lambda t: t.update({"base_model.model.model.layers.1.mlp.norm.weight": torch.ones(24)}), "has no place in the base"),
    (PLAIN, {"modules_to_save": NORMS}, lambda t: t.update({k: v[:-1] for k, v in t.items() if "norm" in k}), "norm.*shape mismatch"),
    (PLAIN, {"modules_to_save": ["embed_tokens"]}, lambda t: t.update({k: v[:-1] for k, v in t.items() if "embed" in k}),
     "49 rows, fewer than the 50 tokens"),
    (PLAIN, {"modules_to_save": BOTH}, lambda t: t.update({k: torch.cat([v, v[:1]]) for k, v in t.items() if "embed" in k}),
     "50 and 51 rows; they are of two"),
    (PLAIN, {"trainable_token_indices": [3, 4]}, lambda t: t.update({k: v[:1] for k, v in t.items() if "token_adapter" in k}),
     "names 2 tokens"),
    (PLAIN, {"trainable_token_indices": [3, 4]}, lambda t: t.pop(next(k for k in t if "token_adapter" in k)), "holds no trained rows"),
    (PLAIN, {"target_modules": ["embed_tokens"]}, lambda t: t.update({k: v[:, :-1] for k, v in t.items() if "embedding_A" in k}),
     "49 inputs and 24 outputs.* has 50 and 24"),
])
def test_what_is_missing_or_does_not_fit_is_named(
    seed: int, tmp_path: Path, facts: ModelFacts, config: dict[str, object], change: Callable[[dict[str, Tensor]], object], words: str,
) -> None:
    trained(llama(facts), tmp_path, **config)
    with pytest.raises(AdapterError, match=words) as refused:
        load_adapter(open_adapter(edit(tmp_path, lambda tensors: (change(tensors), tensors.update(
            {name: tensor.contiguous() for name, tensor in tensors.items()})))), facts, "it")
    assert "\n" not in str(refused.value)


def test_rows_without_their_tokens_and_magnitudes_without_the_flag_are_refused(seed: int, tmp_path: Path) -> None:
    trained(llama(PLAIN), tmp_path / "rows", trainable_token_indices=[1, 2])
    trained(llama(PLAIN), tmp_path / "dora", use_dora=True)
    with pytest.raises(AdapterError, match="trainable_token_indices in the config does not name them"):
        load_adapter(open_adapter(edit(tmp_path / "rows", trainable_token_indices=None)), PLAIN, "it")
    with pytest.raises(AdapterError, match="the config does not set use_dora"):
        load_adapter(open_adapter(edit(tmp_path / "dora", use_dora=False)), PLAIN, "it")
    with pytest.raises(AdapterError, match="is for the token 60"):
        load_adapter(open_adapter(edit(tmp_path / "rows", trainable_token_indices=[60, 2])), PLAIN, "it")


def test_configs_of_the_first_peft() -> None:
    written = {"peft_type": "LORA", "r": 8, "lora_alpha": 16.0, "target_modules": ["q_proj"], "enable_lora": None, "merge_weights": True}
    assert parse_settings(written, Path("adapter_config.json")).scaling(16.0, 8) == 2
    with pytest.raises(AdapterError, match=".enable_lora. is \\[true, false, true\\]: LoRA on parts of a matrix"):
        parse_settings(written | {"enable_lora": [True, False, True]}, Path("adapter_config.json"))

"""Facts of architectures out of files as people have them: real sizes, older spellings, contradictions, junk; and cache entries."""
from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_TOKENS, tiny_tokenizer
from tiny_models import CONFIGS, make_model, save_folder, save_gguf

from lora_bench.engine.base_file import open_base
from lora_bench.engine.inspect import inspect_path
from lora_bench.engine.models import ARCHITECTURES_CONFIG, ARCHITECTURES_GGUF, ModelFacts
from lora_bench.engine.models.facts import NORMS_AROUND, Rope, RopeScaling
from lora_bench.engine.models.names import permuted_heads
from lora_bench.engine.weights.files import FormatError

SIZES = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
         "vocab_size": 50}
DENSE = {"granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 40}}
"""what makes a model of the kinds that others are too"""
PATH = Path("config.json")


def _facts(kind: str, **fields: Any) -> ModelFacts:
    config = SIZES | {"model_type": kind} | fields
    return ARCHITECTURES_CONFIG[kind]({key: value for key, value in config.items() if value != "absent"}, PATH)


# -- what is read ---------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, fields, expected", [
    ("mistral", {}, {"windows": (4096,) * 4, "kv_heads": 2, "context": 131072}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": "absent", "num_attention_heads": 8}, {"windows": (), "kv_heads": 8}),
    ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}, {"windows": ()}),
    ("mistral", {"num_key_value_heads": None}, {"kv_heads": 6}),
    ("qwen2", {"sliding_window": 1024, "use_sliding_window": False, "max_window_layers": 2},
     {"windows": (), "attention_bias": True, "output_bias": False}),
    ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 3}, {"windows": (0, 0, 0, 1024), "tied": False}),
    ("qwen3", {"head_dim": "absent"}, {"head_dim": 128, "qk_norm": "head"}),
    ("gemma2", {}, {"windows": (4096, 0) * 2, "head_dim": 256, "attention_softcap": 50.0, "logit_softcap": 30.0, "tied": True,
                    "attention_scale": 1 / 16, "norms": NORMS_AROUND, "norm_offset": 1.0, "activation": "gelu_tanh"}),
    ("gemma2", {"hidden_act": "gelu"}, {"activation": "gelu_tanh"}),
    ("gemma3_text", {"num_attention_heads": "absent", "num_key_value_heads": "absent", "vocab_size": "absent", "num_hidden_layers": 7},
     {"heads": 8, "kv_heads": 4, "vocab": 262208, "rope_theta": 1e6, "rope_scaling": None, "local_rope": Rope(1e4),
      "windows": (4096,) * 5 + (0, 4096), "architecture": "gemma3"}),
    ("granite", {"logits_scaling": 8, "embedding_multiplier": 12, "attention_multiplier": 0.015625, "residual_multiplier": 0.22},
     {"logit_divisor": 8.0, "embedding_scale": 12.0, "attention_scale": 0.015625, "residual_scale": 0.22}),
    ("granite", {}, {"attention_scale": 1.0}),
    ("phi3", {"partial_rotary_factor": 0.75}, {"rotary_dim": 6, "head_dim": 8, "fused": True, "rms_eps": 1e-5}),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, "max_position_embeddings": 131072},
     {"rope_scaling": RopeScaling("longrope", 32.0, original_context=4096, attention_factor=1.1902380714238083, short_factors=(1.0,) * 4,
                                  long_factors=(2.0,) * 4), "long_after": 4096}),
    ("phi3", {"rope_scaling": {"type": "yarn", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}, {"long_after": 4096}),
    ("smollm3", {}, {"layers_without_rope": (3,), "rope_theta": 2e6, "tied": True}),
    ("olmo2", {"attention_bias": True}, {"qk_norm": "all", "attention_bias": True, "output_bias": True}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 512},
     {"rope_scaling": RopeScaling("yarn", 2.0, original_context=512, attention_factor=1.0693147180559945)}),
])
def test_defaults_and_spellings_are_those_of_transformers(kind: str, fields: dict, expected: dict) -> None:
    facts = _facts(kind, **fields)
    assert {name: getattr(facts, name) for name in expected} == expected


def test_what_a_user_should_know_is_noted() -> None:
    (note,) = _facts("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=4096).notes
    assert note.startswith("dynamic RoPE scaling acts beyond 4,096 tokens")
    (note,) = _facts("phi3", auto_map={"AutoModel": "modeling_phi3.Phi3ForCausalLM"}).notes
    assert "auto_map" in note and "never run, the model is computed as every phi3 model" in note


def test_only_some_gguf_files_hold_rows_in_another_order() -> None:
    llama, phi3 = _facts("llama"), _facts("phi3")
    assert (permuted_heads(llama, "layers.0.self_attn.q_proj"), permuted_heads(llama, "layers.0.self_attn.k_proj")) == (6, 2)
    assert permuted_heads(llama, "layers.0.self_attn.v_proj") is None and permuted_heads(llama, "self_attn.k_proj") == 2
    assert permuted_heads(phi3, "layers.0.self_attn.qkv_proj") is None
    kinds = {kind for kind in ARCHITECTURES_CONFIG if permuted_heads(_facts(kind, **DENSE.get(kind, {})), "self_attn.q_proj")}
    assert kinds == {"llama", "mistral", "ministral", "granite", "granitemoehybrid", "smollm3"}


@pytest.mark.parametrize("name, said", [
    ("gemma3", {"windows": [0, 9], "local_rope": 1e4, "qk_norm": "head", "activation": "gelu_tanh", "norm_offset": 1.0}),
    ("phi3", {"windows": [9], "rotary_dim": 6, "fused": True}), ("llama", {}), ("olmo2", {"qk_norm": "all"}),
])
def test_inspect_says_what_tells_a_model_from_a_plain_llama(name: str, said: dict, tmp_path: Path) -> None:
    told = inspect_path(save_folder(make_model(name), tmp_path / "m", tiny_tokenizer()))
    assert {key: told["other_facts"].get(key) for key in said} == said and (said or not told["other_facts"])
    json.dumps(told)
    if name == "gemma3":
        assert told["rope_scaling"] == {"kind": "linear", "factor": 4.0}


# -- what is refused ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, fields, words", [
    ("llama", {"attention_multiplier": 0.1}, "attention_multiplier is 0.1"), ("llama", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("llama", {"num_local_experts": 8}, "num_local_experts is 8"), ("llama", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor .* list of 4"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
     "original_max_position_embeddings"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "ministral"),
    ("mistral", {"sliding_window": -3}, "sliding_window"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "each of 4 layers"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "contradict"), ("qwen2", {"layer_types": "sliding_attention"}, "a list"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": True, "max_window_layers": 0}, "whole number"),
    ("gemma2", {"sliding_window": None}, "sliding_window is missing"), ("gemma2", {"query_pre_attn_scalar": 0}, "positive"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
    ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"), ("gemma3_text", {"sliding_window_pattern": 0}, "pattern"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "one object for full_attention"),
    ("granite", {"logits_scaling": 0}, "logits_scaling"), ("granite", {"residual_multiplier": "x"}, "number is expected"),
    ("phi3", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"), ("phi3", {"partial_rotary_factor": 0.4}, "even number"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 3 + ["attention"]}, "attention in each of 4 layers is expected: the hybrids"),
    ("granitemoehybrid", {"num_local_experts": 62}, "mixtures of experts are not supported"),
    ("granitemoehybrid", {"layer_types": ["attention"] * 4}, "num_local_experts is 8, only 0"),
    ("granitemoehybrid", {"layer_types": ["attention"] * 4, "num_local_experts": 0, "mlp_bias": True}, "mlp_bias is True, only False"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "each of 4 layers"), ("smollm3", {"no_rope_layer_interval": 0}, "interval"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
])
def test_configs_that_mean_something_else_are_refused(kind: str, fields: dict, words: str) -> None:
    with pytest.raises(FormatError, match=words) as refused:
        _facts(kind, **fields)
    assert str(refused.value).startswith("config.json: ")


@pytest.mark.parametrize("name, keys, words", [
    ("qwen2", {"attention.sliding_window": 8}, "sliding_window is 8"),
    ("gemma3", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping"),
    ("gemma2", {"attention.sliding_window_pattern": [True, False]}, "each of 3 layers"),
    
    ("qwen3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    ("qwen2", {"rope.dimension_count": 2}, "only equal ones"), ("phi3", {"rope.dimension_count": 3}, "even number"),
    ("llama", {"attention.causal": False}, "causal"), ("olmo2", {"embedding_scale": 2.0}, "embedding_scale is 2.0"),
    ("gemma3", {"rope.local.freq_base": 1e4}, "rope.local.freq_base is 10000.0, a key that is not known here"),
    ("granite", {"attention.rope_pattern": [True, False, True]}, "attention.rope_pattern is .*not known here"),
])
def test_gguf_files_that_mean_something_else_are_refused(name: str, keys: dict, words: str, tmp_path: Path) -> None:
    path = save_gguf(make_model(name), name, tmp_path / "m.gguf", TINY_TOKENS, keys)
    with pytest.raises(FormatError, match=words) as refused:
        open_base(path)
    assert str(path) in str(refused.value)


def test_a_window_that_gguf_files_lose_is_said() -> None:
    keys = {"block_count": 32, "embedding_length": 4096, "attention.head_count": 32, "attention.head_count_kv": 8, "context_length": 32768,
            "feed_forward_length": 14336, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 32000}

    def notes(theta: float) -> tuple[str, ...]:
        metadata = {f"llama.{key}": value for key, value in (keys | {"rope.freq_base": theta}).items()}
        return ARCHITECTURES_GGUF["llama"](metadata, {}, PATH).notes

    assert notes(1e6) == () and "sliding window of 4,096 tokens" in notes(1e4)[0]


def test_gguf_windows_by_layer_and_heads_by_layer(tmp_path: Path, seed: int) -> None:
    keys = {"attention.sliding_window_pattern": [False, True, True], "attention.head_count_kv": [3, 3, 3]}
    facts = open_base(save_gguf(make_model("gemma2"), "gemma2", tmp_path / "m.gguf", TINY_TOKENS, keys)).facts
    assert facts.windows == (0, 9, 9) and facts.kv_heads == 3


def test_tensors_that_contradict_the_facts_are_refused(tmp_path: Path) -> None:
    as_llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    folder = save_folder(make_model("qwen3"), tmp_path / "q", tiny_tokenizer(), as_llama)
    with pytest.raises(FormatError, match="k_norm.weight' and .* that a plain llama model does not use"):
        open_base(folder)
    folder = save_folder(make_model("llama"), tmp_path / "l", tiny_tokenizer(), {"model_type": "olmo2", "architectures": None})
    with pytest.raises(FormatError, match="is missing"):
        open_base(folder)


JUNK = [None, True, -1, 0, 10**30, 10**400, 1.5, float("nan"), float("inf"), "", "x" * 300, "\x1b[2J", [], [[]], [None],
        ["x"], {}, {"a": {}}, [0] * 4]
FIELDS = (
    "layer_types", "no_rope_layers", "no_rope_layer_interval", "rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq",
    "partial_rotary_factor", "original_max_position_embeddings", "sliding_window_pattern", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation", "head_dim", "use_sliding_window", "max_window_layers",
    "attention_multiplier", "auto_map",
)
ROPE = {"rope_type": "yarn", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True, "original_max_position_embeddings": 64, "rope_theta": 1e4,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize("kind", ARCHITECTURES_CONFIG)
def test_any_value_of_any_field_gives_facts_or_a_sentence(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    for field in (*SIZES, *FIELDS, "sliding_window", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings"):
        for junk in chance.sample(JUNK, 8):
            _facts_or_a_sentence(kind, {"use_sliding_window": chance.random() < 0.5} | {field: junk})
    for field in ROPE:
        for junk in chance.sample(JUNK, 6):
            rope = ROPE | {"rope_type": chance.choice(("yarn", "longrope", "llama3", "linear", "dynamic"))} | {field: junk}
            _facts_or_a_sentence(kind, {"rope_scaling": rope})
            _facts_or_a_sentence(kind, {"rope_parameters": {"full_attention": rope, "sliding_attention": {field: junk}}})


def _facts_or_a_sentence(kind: str, fields: dict[str, Any]) -> None:
    try:
        ARCHITECTURES_CONFIG[kind](SIZES | {"model_type": kind} | DENSE.get(kind, {}) | fields, PATH)
    except FormatError as error:
        assert str(error).isprintable() and str(error).startswith("config.json: ")


# -- the Hugging Face cache -----------------------------------------------------------------------
@pytest.fixture
def entry(tmp_path: Path, tiny_folder: Callable[..., Path]) -> Callable[..., Path]:
    """`entry({snapshot: complete}, main=name)` makes a cache entry as huggingface_hub lays it out, the first snapshot the oldest."""

    def make(snapshots: dict[str, bool], main: str | None = None) -> Path:
        top = tmp_path / "models--some--tiny-model"
        (top / "refs").mkdir(parents=True)
        (top / "blobs").mkdir()
        for age, (name, complete) in enumerate(snapshots.items()):
            folder = top / "snapshots" / name
            folder.mkdir(parents=True)
            for file in tiny_folder(f"plain-{name}", config={"rope_theta": 10000.0 + age}).iterdir():
                if complete or file.suffix != ".safetensors":
                    blob = top / "blobs" / f"{name}-{file.name}"
                    file.rename(blob)
                    (folder / file.name).symlink_to(Path("../../blobs") / blob.name)
            os.utime(folder, (1e9 + age, 1e9 + age))
        if main is not None:
            (top / "refs" / "main").write_text(main)
        return top

    return make


@pytest.mark.parametrize("snapshots, main, taken", [
    ({"aaa": True, "bbb": True}, "aaa", "aaa"), ({"aaa": True, "bbb": True}, None, "bbb"), ({"aaa": True, "bbb": False}, "bbb\n", "aaa"),
    ({"aaa": True}, "../../../etc", "aaa"),
])
def test_a_cache_entry_is_the_snapshot_of_main_or_the_newest_complete_one(
    entry: Callable, snapshots: dict, main: str, taken: str,
) -> None:
    top = entry(snapshots, main)
    base = open_base(top)
    assert base.path == top / "snapshots" / taken and base.name == "some/tiny-model"
    assert open_base(base.path) == base == open_base(base.path / "config.json")


def test_cache_entries_that_hold_no_model(entry: Callable) -> None:
    top = entry({"aaa": False}, "aaa")
    with pytest.raises(FormatError, match="the download is incomplete"):
        open_base(top)


def test_a_cache_entry_of_gguf_files(tmp_path: Path, tiny_gguf: Callable) -> None:
    folder = tmp_path / "models--some--tiny-GGUF" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    tiny_gguf("one.gguf").rename(folder / "one.gguf")
    assert open_base(folder.parent.parent).path == folder / "one.gguf"
    tiny_gguf("two.gguf").rename(folder / "two.gguf")
    with pytest.raises(FormatError, match="holds 2 GGUF files .one.gguf, two.gguf.; give the path of one"):
        open_base(folder.parent.parent)


# -- numbers of the decoder's own making ------------------------------------------------------------
def test_memory_counts_every_norm_and_bias(tmp_path: Path) -> None:
    from lora_bench.engine.models.decoder import Decoder
    from lora_bench.engine.weights.load import load_weights

    for name in CONFIGS:
        base = open_base(save_folder(make_model(name), tmp_path / name, tiny_tokenizer()))
        weights = load_weights(base, "cpu", torch.float32)
        total = sum(tensor.nbytes for tensor in weights.values())
        assert Decoder(base.facts, weights, 32).nbytes == total and not weights, name

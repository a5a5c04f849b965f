"""Every architecture of both formats against transformers: the logits of every position, in chunks and token by token over the KV cache."""
from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_TOKENS, tiny_tokenizer
from engine_bench import Bench
from tiny_models import CONFIGS, VOCAB, make_model, save_folder, save_gguf
from torch import Tensor

from lora_bench.engine.base_file import open_base
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BlockTable
from lora_bench.engine.models import ARCHITECTURES_CONFIG, ARCHITECTURES_GGUF, WRAPPED
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.protocol import TokenIds
from lora_bench.engine.weights.load import load_weights

CPU = torch.device("cpu")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
TOKENS = 40


def _decoder(path: Path) -> Decoder:
    base = open_base(path)
    return Decoder(base.facts, load_weights(base, "cpu", torch.float32), base.facts.context)


def _logits(decoder: Decoder, ids: list[int], sizes: list[int]) -> Tensor:
    """The logits of all of `ids` [tokens, vocab], computed in chunks of `sizes`."""
    caches, table = decoder.kv_cache(14, 16), BlockTable(tuple(sorted(random.sample(range(14), 6))))
    for cache in caches:
        cache.fill_(float("nan"))
    done, parts = 0, []
    for size in sizes:
        chunk = Chunk(ids[done:done + size], done, table, True, every=True, rope_start=decoder.rope.start(len(ids)))
        parts.append(decoder.forward(step_inputs([chunk], CPU), caches, None, lambda op: None))
        done += size
    assert done == len(ids)
    return torch.cat(parts)


def _compare(path: Path, model: Any, ids: list[int] | None = None) -> Decoder:
    ids = ids or [random.randrange(5, VOCAB) for _ in range(TOKENS)]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.05, "logits that say something"
    decoder, first = _decoder(path), random.randint(2, len(ids) - 12)
    for sizes in ([len(ids)], [first, len(ids) - first - 10] + [1] * 10, [1] * len(ids)):
        torch.testing.assert_close(_logits(decoder, ids, sizes), expected, **CLOSE)
    return decoder


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_compute_what_transformers_does(name: str, tmp_path: Path, seed: int) -> None:
    model = make_model(name)
    _compare(save_folder(model, tmp_path / "m", tiny_tokenizer()), model)


@pytest.mark.parametrize("name", [{"ministral": "mistral3"}.get(name, name) for name in CONFIGS])
def test_gguf_files_of_the_same_weights_do_too(name: str, tmp_path: Path, seed: int) -> None:
    model = make_model("mistral", sliding_window=None) if name.startswith("mistral") else make_model(name)
    _compare(save_gguf(model, name, tmp_path / "m.gguf", TINY_TOKENS), model)


def test_a_gguf_of_a_granite_without_rope(tmp_path: Path, seed: int) -> None:
    model = make_model("granitemoehybrid", position_embedding_type=None)
    _compare(save_gguf(model, "granitemoehybrid", tmp_path / "m.gguf", TINY_TOKENS, {"rope.scaling.finetuned": False}), model)


@pytest.mark.parametrize("name, changes", [("llama", {"attention_bias": True}), ("qwen2", {}), ("qwen3", {})])
def test_gguf_files_with_q_k_and_v_in_one_tensor(name: str, changes: dict, tmp_path: Path, seed: int) -> None:
    model = make_model(name, **changes)
    decoder = _compare(save_gguf(model, name, tmp_path / "m.gguf", TINY_TOKENS, fuse=True), model)
    assert not decoder.facts.fused and decoder.facts.attention_bias == (name != "qwen3")


def test_every_architecture_that_is_offered_is_compared() -> None:
    assert {*ARCHITECTURES_CONFIG} == {"gemma3_text" if name == "gemma3" else name for name in CONFIGS}
    assert {*ARCHITECTURES_GGUF} == {*CONFIGS} - {"mistral", "ministral", "granitemoehybrid"} | {"mistral3"}
    assert {*WRAPPED.values()} <= {*ARCHITECTURES_CONFIG}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with heads of its own size, tied": ("llama", {"head_dim": 10, "tie_word_embeddings": True}),
    "llama with GELU": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen2 with late windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 6}),
    "qwen3 with biases and windows": ("qwen3", {
        "attention_bias": True, "use_sliding_window": True, "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "gemma2 without softcaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 30}),
    "gemma2 with strong softcaps, untied": ("gemma2", {
        "attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma3 with another pattern": ("gemma3", {"layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
                                               "final_logit_softcapping": 2.0}),
    "granite without multipliers": ("granite", {
        "attention_multiplier": 0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": True}),
    "granitemoehybrid without RoPE": ("granitemoehybrid", {"position_embedding_type": None, "attention_bias": True}),
    "phi3 without a window": ("phi3", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "smollm3 with layers of its choice": ("smollm3", {
        "no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 7, "tie_word_embeddings": False}),
    "smollm3 with an interval": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo2 with biases": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_compute_what_transformers_does(variant: str, tmp_path: Path, seed: int) -> None:
    name, changes = VARIANTS[variant]
    model = make_model(name, **changes)
    _compare(save_folder(model, tmp_path / "m", tiny_tokenizer()), model)


# -- RoPE -----------------------------------------------------------------------------------------
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn with mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 24, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8.0,
        "beta_slow": 0.5, "truncate": False},
    "yarn with its attention factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "attention_factor": 0.8},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 30, "short_factor": [1.0, 1.1, 1.3, 1.7],
                 "long_factor": [1.0, 2.0, 4.0, 9.0]},
    "longrope with factors": {
        "rope_type": "longrope", "original_max_position_embeddings": 30, "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.0, 2.0, 4.0, 9.0], "factor": 5.0, "attention_factor": 1.2},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_of_every_kind(kind: str, tmp_path: Path, seed: int) -> None:
    model = make_model("llama", head_dim=8, rope_parameters=ROPES[kind] | {"rope_theta": 5000.0})
    folder = save_folder(model, tmp_path / "m", tiny_tokenizer())
    for tokens in (20, TOKENS):
        _compare(folder, model, [random.randrange(5, VOCAB) for _ in range(tokens)])


@pytest.mark.parametrize("kind", ROPES)
def test_older_files_say_the_same(kind: str, tmp_path: Path, seed: int) -> None:
    model = make_model("llama", head_dim=8, rope_parameters=ROPES[kind] | {"rope_theta": 5000.0})
    older = {key: value for key, value in ROPES[kind].items() if key != "rope_type"} | {"type": ROPES[kind]["rope_type"]}
    folder = save_folder(model, tmp_path / "m", tiny_tokenizer(), {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": older})
    _compare(folder, model)


def test_older_gemma3_files_say_the_same(tmp_path: Path, seed: int) -> None:
    model = make_model("gemma3", sliding_window=7)
    older = {"rope_parameters": None, "layer_types": None, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
             "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    decoder = _compare(save_folder(model, tmp_path / "m", tiny_tokenizer(), older), model)
    assert decoder.facts.windows == (7,) * 5 + (0, 7)


GGUF_ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Tensor]]] = {
    "linear": ("llama", ROPES["linear"], {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}, {}),
    "linear of old files": ("llama", ROPES["linear"], {"rope.scale_linear": 3.0}, {}),
    "yarn": ("qwen2", ROPES["yarn"], {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24}, {}),
    "yarn with a field that transformers passes over": ("qwen3", ROPES["yarn"] | {"beta_fast": 8.0, "beta_slow": 0.5, "attn_factor": 0.8}, {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24,
        "rope.scaling.yarn_attn_factor": 0.8, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 0.5}, {}),
    "yarn with its attention factor": ("qwen3", ROPES["yarn with its attention factor"], {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24,
        "rope.scaling.attn_factor": 0.8 / (1 + 0.1 * math.log(4))}, {}),
    "longrope": ("phi3", ROPES["longrope"] | {"partial_rotary_factor": 1.0}, {
        "rope.scaling.original_context_length": 30, "rope.scaling.attn_factor": (1 + 1.1631508098 / 3.4011973817) ** 0.5,
        "rope.dimension_count": 8}, {"rope_factors_short.weight": torch.tensor([1.0, 1.1, 1.3, 1.7]),
                                     "rope_factors_long.weight": torch.tensor([1.0, 2.0, 4.0, 9.0])}),
}


@pytest.mark.parametrize("kind", GGUF_ROPES)
def test_rope_of_gguf_files(kind: str, tmp_path: Path, seed: int) -> None:
    name, rope, keys, tensors = GGUF_ROPES[kind]
    own = {"original_max_position_embeddings": 30, "sliding_window": None} if name == "phi3" else {"head_dim": 8}
    model = make_model(name, **own, rope_parameters=rope | {"rope_theta": 5000.0})
    path = save_gguf(model, name, tmp_path / "m.gguf", TINY_TOKENS, keys, tensors)
    for tokens in (20, TOKENS):
        _compare(path, model, [random.randrange(5, VOCAB) for _ in range(tokens)])


def test_a_gguf_of_llama3_rope_has_its_frequencies(tmp_path: Path, seed: int) -> None:
    model = make_model("llama", head_dim=8, rope_parameters=ROPES["llama3"] | {"rope_theta": 5000.0})
    plain = 5000.0 ** (-torch.arange(0, 8, 2) / 8)
    factors = {"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq}
    _compare(save_gguf(model, "llama", tmp_path / "m.gguf", TINY_TOKENS, {}, factors), model)


# -- generation -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name, changes, tokens", [
    ("mistral", {}, 60), ("gemma2", {}, 60), ("gemma3", {}, 60),
    ("phi3", {"original_max_position_embeddings": 30, "sliding_window": None,
              "rope_parameters": ROPES["longrope"] | {"rope_theta": 5000.0, "partial_rotary_factor": 1.0}}, 50),
])
def test_greedy_replies_beyond_the_window_are_those_of_transformers(
    name: str, changes: dict, tokens: int, tmp_path: Path, seed: int,
) -> None:
    model = make_model(name, **changes)
    bench = Bench(save_folder(model, tmp_path / "m", tiny_tokenizer()), dtype="fp32")
    compared = 0
    for length in (6, 25, 31):
        prompt = [random.randrange(5, VOCAB) for _ in range(length)]
        expected = _greedy(model, prompt, tokens)
        bench.submit(length, TokenIds(tuple(prompt)), max_tokens=tokens, temperature=0.0)
        bench.run()
        assert list(bench.ids(length))[:len(expected)] == expected
        compared += len(expected)
    assert compared > 60, "replies that outgrow the window"


def _greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """What the model says to `prompt` when every token is computed anew from all before it; ends before a close decision
    and a special token."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        first, second = logits.topk(2).values
        if first - second < 1e-3 or int(logits.argmax()) < 5:
            break
        ids.append(int(logits.argmax()))
    return ids[len(prompt):]


# -- numbers of 16 bits ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "granite", "phi3", "olmo2"])
def test_bf16_stays_near(name: str, tmp_path: Path, seed: int) -> None:
    model = make_model(name)
    base = open_base(save_folder(model, tmp_path / "m", tiny_tokenizer()))
    decoder = Decoder(base.facts, load_weights(base, "cpu", torch.bfloat16), 96)
    ids = [random.randrange(5, VOCAB) for _ in range(TOKENS)]
    with torch.no_grad():
        exact, rounded = model(torch.tensor([ids])).logits[0], model.to(torch.bfloat16)(torch.tensor([ids])).logits[0].float()
    got = _logits(decoder, ids, [TOKENS]).float()
    assert (got - exact).norm() < 1.3 * (rounded - exact).norm()
    assert decoder.layers[0].norms[0].rms.weight.dtype == (torch.float32 if "gemma" in name else torch.bfloat16)


# -- language models inside of others --------------------------------------------------------------
@pytest.mark.parametrize("layout", [("language_model.model.", "language_model."), ("model.language_model.", "")])
@pytest.mark.parametrize("kind, inner", [("gemma3", "gemma3"), ("llava", "llama"), ("mistral3", "mistral")])
def test_the_language_model_of_one_that_sees(kind: str, inner: str, layout: tuple[str, str], tmp_path: Path, seed: int) -> None:
    from safetensors.torch import load_file, save_file

    model = make_model(inner)
    folder = save_folder(model, tmp_path / "m", tiny_tokenizer())
    body, head = layout
    tensors = {(body + name[6:] if name.startswith("model.") else head + name): tensor
               for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.x.weight": torch.ones(3), "multi_modal_projector.y": torch.ones(3)}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    if kind != "gemma3":
        del text["model_type"]
    (folder / "config.json").write_text(json.dumps({
        "model_type": kind, "architectures": [f"{kind}ForConditionalGeneration"], "text_config": text, "vision_config": {}}))
    _compare(folder, model)
    assert any("its 2 tensors for that are not used" in note for note in open_base(folder).notes)


def test_a_head_beside_a_tied_embedding_is_used(tmp_path: Path, seed: int) -> None:
    model = make_model("llama", tie_word_embeddings=False)
    _compare(save_folder(model, tmp_path / "m", tiny_tokenizer(), {"tie_word_embeddings": True}), model)

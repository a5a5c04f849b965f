"""Tiny random transformers models of every architecture, as folders and as GGUF files in the form of llama.cpp's converter."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

VOCAB = 50
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
CONFIGS = {
    "llama": (transformers.LlamaConfig, {"rms_norm_eps": 1e-5}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 9}),
    "ministral": (transformers.MinistralConfig, {
        "sliding_window": 9, "head_dim": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 10, "num_key_value_heads": 3}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9, "num_key_value_heads": 3}),
    "gemma3": (transformers.Gemma3TextConfig, {
        "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9, "num_hidden_layers": 7,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "granite": (transformers.GraniteConfig, {
        "attention_multiplier": 0.3, "embedding_multiplier": 7.0, "residual_multiplier": 0.4, "logits_scaling": 3.0}),
    "granitemoehybrid": (transformers.GraniteMoeHybridConfig, {
        "attention_multiplier": 0.3, "embedding_multiplier": 7.0, "residual_multiplier": 0.4, "logits_scaling": 3.0, "num_local_experts": 0,
        "shared_intermediate_size": 44, "layer_types": ["attention"] * 3, "position_embedding_type": "rope", "mamba_n_heads": 4,
        "mamba_d_head": 12}),
    "phi3": (transformers.Phi3Config, {
        "hidden_size": 48, "sliding_window": 9, "original_max_position_embeddings": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "smollm3": (transformers.SmolLM3Config, {"num_hidden_layers": 5}),
    "olmo2": (transformers.Olmo2Config, {"rms_norm_eps": 1e-5}),
}
"""name -> (class of its config, what differs from SIZES)"""
_INTERLEAVED = ("llama", "mistral", "mistral3", "granite", "granitemoehybrid", "smollm3")
_GGUF_ARCHITECTURE = {"mistral": "llama", "granitemoehybrid": "granite"}


def make_model(name: str, **changes: Any) -> Any:
    """A random model in fp32 with its eager attention, whose weights matter: norms that are not 1, biases that are not 0.

    It hardly ever says one of the five special tokens, whose logits are 0.
    """
    kind, own = CONFIGS[name]
    config = kind(**SIZES | own | changes, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    offset = 0.0 if name.startswith("gemma") else 1.0
    with torch.no_grad():
        for key, weight in model.named_parameters():
            spread = torch.randn(weight.shape)
            if key.endswith("norm.weight"):
                weight.copy_(offset + spread * 0.2)
            else:
                weight.copy_(spread * 0.3 if weight.dim() == 1 or "embed" in key else spread / math.sqrt(weight.shape[1]))
        model.lm_head.weight[:5] = 0
    return model


def save_folder(model: Any, folder: Path, tokenizer: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Path:
    """The model as transformers saves it, and a tokenizer; `changes` replace fields of config.json, None takes one away."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in (changes or {})}
    path.write_text(json.dumps(config | {key: value for key, value in (changes or {}).items() if value is not None}))
    return folder


def save_gguf(model: Any, name: str, path: Path, tokens: list[str], keys: Mapping[str, Any] | None = None,
              extra: Mapping[str, Tensor] | None = None, fuse: bool = False) -> Path:
    """The same weights in F32; `keys` are more metadata of the architecture, `extra` more tensors; `fuse` lays q, k and v into one."""
    config, architecture = model.config, _GGUF_ARCHITECTURE.get(name, name)
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    counts = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    counts |= {} if name == "phi3" else {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for key, value in (counts | _own_keys(config, name) | dict(keys or {})).items():
        _add(writer, f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, 3, 3] + [1] * (len(tokens) - 5))
    writer.add_token_merges(["t h", "h e"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tensors = _tensors(model, name)
    for key, weight in (_fused(tensors) if fuse else tensors).items():
        stem, _, kind = key.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem) or _fused_name(stem)}.{kind}", weight.contiguous().numpy())
    for key, weight in (extra or {}).items():
        writer.add_tensor(key, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any, name: str) -> dict[str, Tensor]:
    config = model.config
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    tensors = {key: weight.detach() for key, weight in model.state_dict().items() if key not in tied}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if name in _INTERLEAVED else {}
    for key, weight in tensors.items():
        if name.startswith("gemma") and key.endswith("norm.weight"):
            tensors[key] = weight + 1
        if count := heads.get(key.split(".")[-2]):
            tensors[key] = weight.reshape(count, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    for key in [key for key in tensors if ".shared_mlp." in key]:
        weight, (before, after) = tensors.pop(key), key.split("shared_mlp.")
        if after == "output_linear.weight":
            tensors[f"{before}mlp.down_proj.weight"] = weight
        else:
            tensors |= {f"{before}mlp.{part}_proj.weight": half for part, half in zip(("gate", "up"), weight.chunk(2), strict=True)}
    return tensors


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k and v of each layer, weights and biases, in one tensor by the name that other families have for it."""
    own = {key: weight for key, weight in tensors.items() if key.split(".")[-2] not in ("q_proj", "k_proj", "v_proj")}
    for key in [key for key in tensors if ".q_proj." in key]:
        parts = [tensors[key.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
        own[key.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return own


def _own_keys(config: Any, name: str) -> dict[str, Any]:
    rope = config.rope_parameters
    keys: dict[str, Any] = {"rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"])}
    if name == "gemma2":
        keys |= {"attn_logit_softcapping": config.attn_logit_softcapping, "final_logit_softcapping": config.final_logit_softcapping}
    if name in ("gemma2", "gemma3", "phi3"):
        keys["attention.sliding_window"] = config.sliding_window or 0
    if name == "gemma3" and rope["full_attention"]["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["full_attention"]["factor"]}
    if name.startswith("granite"):
        keys |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
                 "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    if name == "phi3":
        keys["rope.dimension_count"] = int(rope["partial_rotary_factor"] * config.hidden_size) // config.num_attention_heads
    return keys


def _fused_name(stem: str) -> str:
    return f"blk.{stem.split('.')[2]}.attn_qkv"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)

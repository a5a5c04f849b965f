"""A tiny base of every architecture, its tensors as the product's own facts ask for them."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from lora_bench.engine.models import ARCHITECTURES_CONFIG, ModelFacts, tensor_shapes
from lora_bench.engine.models.names import config_name, gguf_name

from . import gguf_bytes, tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
        "attention_factor": 1.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32,
            "factor": 2.0}
CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"rope_scaling": LLAMA3}, "mistral": {"sliding_window": 9},
    "ministral": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": {"tie_word_embeddings": True, "rope_scaling": YARN}, "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 9, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 9, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 7.0, "residual_multiplier": 0.4, "logits_scaling": 3.0},
    "granitemoehybrid": {
        "num_local_experts": 0, "layer_types": ["attention", "attention"], "shared_intermediate_size": tiny.CONFIG["intermediate_size"]},
    "phi3": {"sliding_window": 9, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE}, "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
}
"""model_type -> what differs from tiny.CONFIG"""
GGUF: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}), "qwen2": ("qwen2", {}), "qwen3": ("qwen3", {}), "granite": ("granite", {
        "attention.scale": 0.3, "embedding_scale": 7.0, "residual_scale": 0.4, "logit_scale": 3.0}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 9}),
    "gemma3": ("gemma3_text", {"attention.sliding_window": 9, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "phi3": ("phi3", {"attention.sliding_window": 9}), "smollm3": ("smollm3", {}), "olmo2": ("olmo2", {}),
}
"""general.architecture -> (the model_type that it is, more metadata)"""


def config(kind: str) -> dict[str, object]:
    return tiny.CONFIG | {"model_type": kind, "architectures": None} | CONFIGS[kind]


def weights(kind: str) -> bytes:
    """model.safetensors of that model_type."""
    random = Random(kind)
    shapes = tensor_shapes(_facts(kind))
    return tiny.safetensors({config_name(name): ("F32", shape, tiny.floats(shape, random)) for name, shape in shapes.items()})


def gguf_file(architecture: str) -> bytes:
    kind, own = GGUF[architecture]
    facts, random = _facts(kind), Random(kind)
    shapes = tensor_shapes(facts)
    tensors: dict[str, gguf_bytes.Tensor] = {
        gguf_name(name, facts): ("F32", shape, tiny.floats(shape, random)) for name, shape in shapes.items()}
    keys = {"attention.key_length": tiny.HEAD_DIM, "attention.value_length": tiny.HEAD_DIM} if kind != "phi3" else {}
    return gguf_bytes.write(tiny.gguf_metadata(architecture, **keys, **own), tensors)


def _facts(kind: str) -> ModelFacts:
    return ARCHITECTURES_CONFIG[kind](json.loads(json.dumps(config(kind))), Path("config.json"))

"""qwen3: a norm of each head of q and k, no biases unless the config says so; windows as qwen2."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import ModelFacts, validate
from .from_config import config_facts, late_windows, open_config
from .from_gguf import gguf_facts, open_gguf

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096}


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "qwen3". Raises FormatError naming the key that is missing, wrong or not supported."""
    source = open_gguf(metadata, path, "qwen3")
    return validate(ModelFacts(**gguf_facts(source, tensors), qk_norm="head"), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "qwen3". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, DEFAULTS, ("Qwen3ForCausalLM", "Qwen3Model"), ("use_sliding_window", "layer_types"))
    bias = source.flag("attention_bias")
    return validate(ModelFacts(
        **config_facts(source, "qwen3"), attention_bias=bias, output_bias=bias, qk_norm="head", windows=late_windows(source)), path)

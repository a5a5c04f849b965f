"""qwen2 (and 2.5): llama with biases on q, k and v; windows on the later layers where the config uses them."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import ModelFacts, validate
from .from_config import config_facts, late_windows, open_config
from .from_gguf import gguf_facts, open_gguf

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "qwen2". Raises FormatError naming the key that is missing, wrong or not supported."""
    source = open_gguf(metadata, path, "qwen2")
    return validate(ModelFacts(**gguf_facts(source, tensors) | {"attention_bias": True}), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "qwen2". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, DEFAULTS, ("Qwen2ForCausalLM", "Qwen2Model"), ("use_sliding_window", "layer_types"))
    return validate(ModelFacts(**config_facts(source, "qwen2"), attention_bias=True, windows=late_windows(source)), path)

"""mistral: llama with one sliding window for all layers; ministral: with windows by layer. Their GGUF files say "llama" or "mistral3"."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import ModelFacts, validate
from .from_config import bounded_layers, clipped, config_facts, layer_types, open_config, windows
from .from_gguf import gguf_facts, open_gguf

DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "mistral3". Raises FormatError naming the key that is missing, wrong or not supported."""
    return validate(ModelFacts(**gguf_facts(open_gguf(metadata, path, "mistral3"), tensors)), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "mistral". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, DEFAULTS, ("MistralForCausalLM", "MistralModel"), ("layer_types",))
    sizes = [source.count("sliding_window", 0)] * bounded_layers(source)
    types = layer_types(source)
    if len(set(map(str, types))) > 1:
        raise source.error("layer_types", types, "mistral has one sliding_window for all layers; ministral has types of layers")
    return validate(ModelFacts(**config_facts(source, "mistral"), windows=clipped(sizes, source)), path)


def ministral_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "ministral"; raises as `facts_from_config`."""
    source = open_config(config, path, DEFAULTS, ("MinistralForCausalLM", "MinistralModel"), ("layer_types",))
    sliding = [source.get("sliding_window") is not None] * bounded_layers(source)
    return validate(ModelFacts(**config_facts(source, "ministral"), windows=windows(source, sliding)), path)



"""smollm3: llama with layers that have no RoPE, every fourth unless the config says which."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import ModelFacts, validate
from .fields import Fields
from .from_config import bounded_layers, config_facts, open_config, refuse_unused_windows, windows
from .from_gguf import gguf_facts, open_gguf
from .llama import biases

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0}
HONOURS = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "layer_types")
INTERVAL = 4
"""which GGUF files do not tell; llama.cpp takes it for every smollm3"""


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "smollm3". Raises FormatError naming the key that is missing, wrong or not supported."""
    source = open_gguf(metadata, path, "smollm3")
    facts = gguf_facts(source, tensors)
    return validate(ModelFacts(**facts, layers_without_rope=tuple(range(INTERVAL - 1, min(facts["layers"], 1024), INTERVAL))), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "smollm3". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, DEFAULTS, ("SmolLM3ForCausalLM", "SmolLM3Model"), HONOURS)
    without = _layers_without_rope(source)
    used = source.flag("use_sliding_window") and source.get("sliding_window") is not None
    refuse_unused_windows(source, used)
    sizes = windows(source, [used and layer in without for layer in range(bounded_layers(source))])
    return validate(ModelFacts(**config_facts(source, "smollm3") | biases(source), layers_without_rope=without, windows=sizes), path)


def _layers_without_rope(source: Fields) -> tuple[int, ...]:
    count, interval = bounded_layers(source), source.count("no_rope_layer_interval", INTERVAL)
    if interval < 1:
        raise source.error("no_rope_layer_interval", interval, "a positive number of layers is expected")
    turns = source.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(count)])
    if not isinstance(turns, list) or len(turns) < count or any(item not in (0, 1) for item in turns):
        raise source.error("no_rope_layers", turns, f"0 (no RoPE) or 1 for each of {count} layers is expected")
    return tuple(layer for layer in range(count) if not turns[layer])

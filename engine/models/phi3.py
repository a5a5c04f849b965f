"""phi3 (and phi-4): llama with q, k, v in one matrix and gate, up in another, longrope, RoPE of a part of each head, a window."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import ModelFacts, validate
from .fields import Fields
from .from_config import bounded_layers, clipped, config_facts, head_size, open_config
from .from_gguf import gguf_facts, gguf_windows, open_gguf

DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
NO_WINDOW = "the file does not say whether the model has a sliding window; none is used"


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "phi3". Raises FormatError naming the key that is missing, wrong or not supported.

    The window is honoured as transformers does; llama.cpp reads it and uses none.
    """
    source = open_gguf(metadata, path, "phi3", ("attention.sliding_window",))
    window = source.count("attention.sliding_window", 0)
    return validate(ModelFacts(
        **gguf_facts(source, tensors, partial_rotary=True), fused=True, windows=gguf_windows(source, window, 0),
        notes=(NO_WINDOW,) if source.get("attention.sliding_window") is None else ()), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "phi3". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, DEFAULTS, ("Phi3ForCausalLM", "Phi3Model"), ("partial_rotary_factor",))
    source = Fields(dict(source.fields) | {key: _renamed(source.get(key)) for key in ("rope_scaling", "rope_parameters")}, path)
    head_dim = head_size(source)
    rotary = int(head_dim * _part_turned(source))
    sizes = [source.count("sliding_window", 0)] * bounded_layers(source)
    facts = config_facts(source, "phi3", 0 if rotary == head_dim else rotary)
    return validate(ModelFacts(**facts, fused=True, windows=clipped(sizes, source)), path)


def _part_turned(source: Fields) -> float:
    """partial_rotary_factor: beside the RoPE parameters or in them, where it wins."""
    given = source.get("rope_scaling") or source.get("rope_parameters")
    inside = Fields(given if isinstance(given, dict) else {}, source.path)
    part = inside.number("partial_rotary_factor", source.number("partial_rotary_factor", 1.0))
    if not 0 < part <= 1:
        raise source.error("partial_rotary_factor", part, "a part of 1 is expected")
    return part


def _renamed(rope: Any) -> Any:
    """phi3's "yarn" of older files is longrope: transformers reads it so."""
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return rope
    return {key: value for key, value in rope.items() if key != "type"} | {"rope_type": "longrope"}

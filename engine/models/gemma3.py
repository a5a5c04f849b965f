"""gemma3 (text): gemma2 without softcaps of scores, with norms of q and k, five windows to one full layer, a RoPE for each kind."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from ..weights.files import FormatError, show
from .facts import ModelFacts, Rope, validate
from .fields import Fields
from .from_config import FULL, SLIDING, bounded_layers, config_facts, open_config, windows
from .from_gguf import gguf_facts, gguf_windows, open_gguf
from .gemma2 import ACTIVATION, family, gguf_attention_scale
from .rope_facts import rope_of

DEFAULTS = {
    "vocab_size": 262208, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}
HONOURS = ("layer_types", "query_pre_attn_scalar", "final_logit_softcapping")
PATTERN = 6
LARGEST = 62


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "gemma3". Raises FormatError naming the key that is missing, wrong or not supported."""
    honours = ("attention.sliding_window", "final_logit_softcapping", "attention.scale", "rope.freq_base_swa")
    source = open_gguf(metadata, path, "gemma3", honours)
    facts = gguf_facts(source, tensors)
    sizes = gguf_windows(source, source.count("attention.sliding_window", 0), PATTERN)
    return validate(ModelFacts(
        **facts, **family(facts["hidden"]), activation="gelu_tanh", qk_norm="head", windows=sizes,
        attention_scale=gguf_attention_scale(source, facts, LARGEST), logit_softcap=source.number("final_logit_softcapping", 0.0),
        local_rope=Rope(source.positive("rope.freq_base_swa", 10000.0))), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "gemma3_text". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, DEFAULTS, ("Gemma3ForCausalLM", "Gemma3TextModel"), HONOURS)
    full, local = _ropes(source)
    one_rope = Fields(dict(source.fields) | {"rope_parameters": full, "rope_scaling": None}, path)
    facts = config_facts(one_rope, "gemma3", activation=ACTIVATION)
    pattern = source.count("sliding_window_pattern", PATTERN)
    if pattern < 1:
        raise source.error("sliding_window_pattern", pattern, "a positive number of layers is expected")
    bias = source.flag("attention_bias")
    return validate(ModelFacts(
        **facts, **family(facts["hidden"]),
        attention_bias=bias, output_bias=bias, qk_norm="head", attention_scale=source.positive("query_pre_attn_scalar") ** -0.5,
        logit_softcap=source.optional_number("final_logit_softcapping"),
        local_rope=rope_of(local, source, facts["head_dim"], facts["context"]),
        windows=windows(source, [(layer + 1) % pattern != 0 for layer in range(bounded_layers(source))])), path)


def _ropes(source: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """RoPE parameters of the full and of the sliding layers: rope_parameters by type of layer, or rope_theta, rope_local_base_freq and
    rope_scaling."""
    newer, older = source.get("rope_parameters", {}), source.get("rope_scaling", {})
    full, local = (newer.get(kind) or {} for kind in (FULL, SLIDING)) if isinstance(newer, dict) else (None, None)
    if not all(isinstance(part, dict) for part in (full, local, older)) or newer and not full and not local:
        raise FormatError(f"{source.path}: the RoPE parameters are {show(newer or older)}; gemma3 has one object for {FULL} "
                          f"and one for {SLIDING}")
    full = {"rope_theta": source.get("rope_theta", 1000000.0)} | _stated(full) | _stated(older)
    return full, {"rope_theta": source.get("rope_local_base_freq", 10000.0)} | _stated(local)


def _stated(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}

"""gemma2: norms around attention and MLP, softcaps, scaled embeddings, a window on every other layer, GELU."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import NORMS_AROUND, ModelFacts, validate
from .fields import Fields
from .from_config import bounded_layers, config_facts, open_config, windows
from .from_gguf import gguf_facts, gguf_windows, open_gguf

DEFAULTS = {
    "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}
HONOURS = ("layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
LARGEST = 46
"""layers of the size whose attention scale is not that of its head_dim, which GGUF files do not tell"""


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "gemma2". Raises FormatError naming the key that is missing, wrong or not supported."""
    honours = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "attention.scale")
    source = open_gguf(metadata, path, "gemma2", honours)
    facts = gguf_facts(source, tensors)
    return validate(ModelFacts(
        **facts, **family(facts["hidden"]), activation="gelu_tanh", attention_scale=gguf_attention_scale(source, facts, LARGEST),
        attention_softcap=source.number("attn_logit_softcapping", 50.0), logit_softcap=source.number("final_logit_softcapping", 30.0),
        windows=gguf_windows(source, source.count("attention.sliding_window", 4096), 2)), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "gemma2". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, DEFAULTS, ("Gemma2ForCausalLM", "Gemma2Model"), HONOURS)
    facts = config_facts(source, "gemma2", activation=ACTIVATION)
    bias = source.flag("attention_bias")
    return validate(ModelFacts(
        **facts, **family(facts["hidden"]),
        attention_bias=bias, output_bias=bias, attention_scale=source.positive("query_pre_attn_scalar") ** -0.5,
        attention_softcap=source.optional_number("attn_logit_softcapping"), logit_softcap=source.optional_number("final_logit_softcapping"),
        windows=windows(source, [layer % 2 == 0 for layer in range(bounded_layers(source))])), path)


def family(hidden: int) -> dict[str, Any]:
    """What gemma2 and gemma3 have in common."""
    return {
        "norms": NORMS_AROUND, "norm_offset": 1.0, "embedding_scale": float(max(hidden, 1)) ** 0.5,
        "rounded_embedding_scale": True,
    }


def gguf_attention_scale(source: Fields, facts: Mapping[str, Any], largest: int) -> float:
    """Of the family's largest size by hidden size and heads, of the others by head_dim (llama.cpp knows them by their layers too)."""
    by_heads = facts["layers"] == largest and facts["heads"] > 0
    size = facts["hidden"] // facts["heads"] if by_heads else facts["head_dim"]
    return source.positive("attention.scale", max(size, 1) ** -0.5)

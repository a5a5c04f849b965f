"""granite: llama with multipliers of embeddings, attention scores, residuals and logits.

A granitemoehybrid without Mamba and experts is one too."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import ModelFacts, validate
from .fields import Fields
from .from_config import FULL, bounded_layers, config_facts, layer_types, open_config
from .from_gguf import gguf_facts, open_gguf
from .llama import biases

HONOURS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
MAX_LAYERS = 1024


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "granite". Raises FormatError naming the key that is missing, wrong or not supported.

    llama.cpp takes rope.scaling.finetuned, which means nothing else in these files, for whether the layers have RoPE.
    """
    source = open_gguf(metadata, path, "granite", ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"))
    facts = gguf_facts(source, tensors)
    without = range(min(facts["layers"], MAX_LAYERS)) if source.get("rope.scaling.finetuned") is False else ()
    return validate(ModelFacts(
        **facts, layers_without_rope=tuple(without), attention_scale=source.number("attention.scale", 0.0),
        embedding_scale=_or_one(source, "embedding_scale"), residual_scale=_or_one(source, "residual_scale"),
        logit_divisor=_or_one(source, "logit_scale")), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "granite". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, {}, ("GraniteForCausalLM", "GraniteModel"), HONOURS)
    return validate(ModelFacts(**config_facts(source, "granite") | biases(source) | _multipliers(source)), path)


def hybrid_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "granitemoehybrid" whose layers are all attention and a plain MLP, the "shared" one.

    Raises FormatError naming the field that is missing, wrong or not supported.
    """
    classes = ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel")
    source = open_config(config, path, {}, classes, (*HONOURS, "layer_types"))
    types = layer_types(source)
    if len(types) != bounded_layers(source) or any(kind not in ("attention", FULL) for kind in types):
        raise source.error("layer_types", types, f"attention in each of {bounded_layers(source)} layers is expected: the hybrids with "
                           "Mamba layers are not supported, Granite 4 models without (micro, 1b, 350m) are")
    for key, default, allowed in (("num_local_experts", 8, 0), ("mlp_bias", False, False)):
        if (value := source.get(key, default)) != allowed:
            raise source.error(key, value, f"only {allowed} is supported for this model: its MLP is the shared one, without biases")
    source = Fields(dict(source.fields) | {"intermediate_size": source.count("shared_intermediate_size", 1024)}, path)
    without = () if source.get("position_embedding_type") == "rope" else range(bounded_layers(source))
    return validate(ModelFacts(
        **config_facts(source, "granite") | biases(source) | _multipliers(source), layers_without_rope=tuple(without)), path)


def _multipliers(source: Fields) -> dict[str, float]:
    return {
        "attention_scale": source.positive("attention_multiplier", 1.0), "embedding_scale": source.positive("embedding_multiplier", 1.0),
        "residual_scale": source.positive("residual_multiplier", 1.0), "logit_divisor": source.positive("logits_scaling", 1.0),
    }


def _or_one(source: Any, key: str) -> float:
    """A scale of which 0 means that there is none."""
    return source.number(key, 0.0) or 1.0

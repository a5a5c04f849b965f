"""granite: llama with multipliers of embeddings, attention scores, residuals and logits."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import ModelFacts, validate
from .from_config import config_facts, open_config
from .from_gguf import gguf_facts, open_gguf
from .llama import biases

HONOURS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "granite". Raises FormatError naming the key that is missing, wrong or not supported."""
    source = open_gguf(metadata, path, "granite", ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"))
    if source.get("rope.scaling.finetuned") is False:
        raise source.error("rope.scaling.finetuned", False, "which means a granite without RoPE; that is not supported")
    return validate(ModelFacts(
        **gguf_facts(source, tensors), attention_scale=source.number("attention.scale", 0.0),
        embedding_scale=_or_one(source, "embedding_scale"), residual_scale=_or_one(source, "residual_scale"),
        logit_divisor=_or_one(source, "logit_scale")), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "granite". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, {}, ("GraniteForCausalLM", "GraniteModel"), HONOURS)
    return validate(ModelFacts(
        **config_facts(source, "granite") | biases(source), attention_scale=source.positive("attention_multiplier", 1.0),
        embedding_scale=source.positive("embedding_multiplier", 1.0), residual_scale=source.positive("residual_multiplier", 1.0),
        logit_divisor=source.positive("logits_scaling", 1.0)), path)


def _or_one(source: Any, key: str) -> float:
    """A scale of which 0 means that there is none."""
    return source.number(key, 0.0) or 1.0

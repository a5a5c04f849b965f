"""llama: RMSNorm before attention and MLP, SwiGLU, all RoPE scalings, biases where the config says so."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import ModelFacts, validate
from .from_config import config_facts, open_config
from .from_gguf import gguf_facts, open_gguf

MISTRAL_7B_1 = {"layers": 32, "hidden": 4096, "kv_heads": 8, "intermediate": 14336, "context": 32768, "rope_theta": 10000.0}
"""the first Mistral 7B and its kin: the other models of these sizes have another context or RoPE base"""
LOST_WINDOW = ("a Mistral 7B v0.1 by its sizes: its sliding window of 4,096 tokens is not in GGUF files, so beyond as many tokens it "
               "computes what llama.cpp does, not what transformers does")


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "llama". Raises FormatError naming the key that is missing, wrong or not supported."""
    source = open_gguf(metadata, path, "llama")
    facts = gguf_facts(source, tensors)
    return validate(ModelFacts(**facts, notes=(LOST_WINDOW,) if MISTRAL_7B_1.items() <= facts.items() else ()), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "llama". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, {}, ("LlamaForCausalLM", "LlamaModel"))
    return validate(ModelFacts(**config_facts(source, "llama") | biases(source)), path)


def biases(source: Any) -> dict[str, bool]:
    """attention_bias of all four attention projections and mlp_bias, as llama, granite and smollm3 have them."""
    attention = source.flag("attention_bias")
    return {"attention_bias": attention, "output_bias": attention, "mlp_bias": source.flag("mlp_bias")}

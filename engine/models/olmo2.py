"""olmo2: norms after attention and MLP only, a norm of all heads of q and of k together."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .facts import NORMS_AFTER, ModelFacts, validate
from .from_config import config_facts, open_config
from .from_gguf import gguf_facts, open_gguf


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "olmo2" (with a sliding window it is an olmo3). Raises FormatError naming the key that is wrong."""
    source = open_gguf(metadata, path, "olmo2")
    return validate(ModelFacts(**gguf_facts(source, tensors), norms=NORMS_AFTER, qk_norm="all"), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json of model_type "olmo2". Raises FormatError naming the field that is missing, wrong or not supported."""
    source = open_config(config, path, {"rms_norm_eps": 1e-5}, ("Olmo2ForCausalLM", "Olmo2Model"))
    bias = source.flag("attention_bias")
    return validate(ModelFacts(
        **config_facts(source, "olmo2"), attention_bias=bias, output_bias=bias, norms=NORMS_AFTER, qk_norm="all"), path)

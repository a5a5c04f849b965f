"""The architectures that run here: one entry each."""
from __future__ import annotations

from .facts import ModelFacts, RopeScaling, module_shapes, tensor_shapes
from .llama import facts_from_config, facts_from_gguf

ARCHITECTURES_GGUF = {"llama": facts_from_gguf}
"""general.architecture of a GGUF -> how its facts are read"""
ARCHITECTURES_CONFIG = {"llama": facts_from_config, "mistral": facts_from_config}
"""model_type of config.json -> how its facts are read"""

__all__ = ["ARCHITECTURES_CONFIG", "ARCHITECTURES_GGUF", "ModelFacts", "RopeScaling", "module_shapes", "tensor_shapes"]

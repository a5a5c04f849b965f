"""The architectures that run here: one entry each."""
from __future__ import annotations

from . import gemma2, gemma3, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3
from .facts import ModelFacts, RopeScaling, module_shapes, tensor_shapes

ARCHITECTURES_GGUF = {
    "llama": llama.facts_from_gguf, "qwen2": qwen2.facts_from_gguf, "qwen3": qwen3.facts_from_gguf, "gemma2": gemma2.facts_from_gguf,
    "gemma3": gemma3.facts_from_gguf, "granite": granite.facts_from_gguf, "phi3": phi3.facts_from_gguf, "smollm3": smollm3.facts_from_gguf,
    "olmo2": olmo2.facts_from_gguf, "mistral3": mistral.facts_from_gguf,
}
"""general.architecture of a GGUF -> how its facts are read"""
ARCHITECTURES_CONFIG = {
    "llama": llama.facts_from_config, "mistral": mistral.facts_from_config, "ministral": mistral.ministral_from_config,
    "qwen2": qwen2.facts_from_config, "qwen3": qwen3.facts_from_config, "gemma2": gemma2.facts_from_config,
    "gemma3_text": gemma3.facts_from_config, "granite": granite.facts_from_config,
    "granitemoehybrid": granite.hybrid_from_config, "phi3": phi3.facts_from_config,
    "smollm3": smollm3.facts_from_config, "olmo2": olmo2.facts_from_config,
}
"""model_type of config.json -> how its facts are read"""
WRAPPED = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama", "llava_next": "llama"}
"""model_type of a model that also sees -> that of its language model, where its text_config names none"""

__all__ = ["ARCHITECTURES_CONFIG", "ARCHITECTURES_GGUF", "WRAPPED", "ModelFacts", "RopeScaling", "module_shapes", "tensor_shapes"]

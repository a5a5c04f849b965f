"""The weights of a PEFT adapter as a safetensors file: its header, its names, its shapes."""
from __future__ import annotations

from random import Random

from .. import peft_folder
from ..mutations import mutate_safetensors
from ..target import Target

WORDS = [
    "F32", "F16", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "U64", "__metadata__", "dtype", "shape", "data_offsets", "lora_adapter_metadata",
    *(f"base_model.model.{name}" for name in (
        "model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_B.weight", "lm_head.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.default.weight", "model.layers.0.self_attn.v_proj.lora_magnitude_vector",
        "model.layers.0.self_attn.v_proj.lora_magnitude_vector.weight", "model.layers.0.self_attn.q_proj.lora_B.bias",
        "model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_B", "model.embed_tokens.weight", "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.base_layer.weight", "model.layers.0.self_attn.q_proj.bias",
        "model.layers.7.self_attn.q_proj.lora_A.weight",
        "model.embed_tokens.token_adapter.trainable_tokens_delta", "model.language_model.layers.0.self_attn.q_proj.lora_A.weight")),
]


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    config, weights = peft_folder.split(data)
    foreign = peft_folder.split(other)
    if random.random() < 0.1:
        config = foreign[0]
    return peft_folder.join(config, mutate_safetensors(weights, foreign[1], random, WORDS))


TARGET = Target(peft_folder.seeds, mutate, peft_folder.prepare, peft_folder.DOCUMENTED, peft_folder.names)

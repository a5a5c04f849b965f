"""Tiny good files as bytes, written here without any library of their format: what the targets begin with."""
from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from random import Random
from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, CONTEXT = 32, 4, 2, 8, 64, 2, 64
TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL.,:!Ġ", "th", "he"]
"""a byte-level vocabulary of 50: five special tokens, characters, two merged tokens"""
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghi", "▁a", "ab", "▁ab"]
"""a SentencePiece vocabulary with byte fallback"""
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
    "added_tokens": [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                      "special": True}
                     for i, text in enumerate(TOKENS[:5])],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(TOKENS)}, "merges": [["t", "h"], ["h", "e"]]},
}


GGUF_SIZES = {
    "block_count": LAYERS, "context_length": CONTEXT, "embedding_length": HIDDEN, "feed_forward_length": INTERMEDIATE,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM, "rope.freq_base": 1e4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
"""keys after the architecture's name"""


def gguf_metadata(architecture: str = "llama", **own: object) -> dict[str, object]:
    """What a converter writes for the tiny base; `own` are more keys of the architecture."""
    sizes = {f"{architecture}.{key}": value for key, value in (GGUF_SIZES | own).items()}
    return {"general.architecture": architecture, "general.name": "tiny"} | sizes | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 3] + [1] * 45, "tokenizer.ggml.merges": ["t h", "h e"], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
    }


def module_shapes() -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every linear of a layer, by its name there."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }


def base_shapes(tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor of the tiny base by its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in module_shapes().items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return shapes if tied else shapes | {"lm_head.weight": (len(TOKENS), HIDDEN)}


def floats(shape: tuple[int, ...], random: Random, half: bool = False) -> bytes:
    """Small random numbers, fp32 or fp16, little endian."""
    count = math.prod(shape)
    return struct.pack(f"<{count}{'e' if half else 'f'}", *(random.uniform(-0.3, 0.3) for _ in range(count)))


def safetensors(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: Mapping[str, str] | None = None) -> bytes:
    """A file of (dtype, shape, data) by name."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def base_weights(random: Random) -> bytes:
    return safetensors({name: ("F32", shape, floats(shape, random)) for name, shape in base_shapes().items()}, {"format": "pt"})


def base_files(random: Random) -> dict[str, bytes]:
    """A whole Hugging Face folder by file name."""
    return {
        "config.json": json.dumps(CONFIG).encode(), "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG).encode(),
        "tokenizer.json": json.dumps(TOKENIZER).encode(), "model.safetensors": base_weights(random),
    }


def adapter_shapes(targets: tuple[str, ...] = ("q_proj", "v_proj"), rank: int = 4) -> dict[str, tuple[int, ...]]:
    """The pairs of a LoRA on `targets` in every layer, by PEFT's names."""
    shapes = {}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in module_shapes().items():
            if name.rpartition(".")[2] in targets:
                path = f"base_model.model.model.layers.{layer}.{name}"
                shapes |= {f"{path}.lora_A.weight": (rank, inputs), f"{path}.lora_B.weight": (outputs, rank)}
    return shapes


def adapter_weights(random: Random, shapes: Mapping[str, tuple[int, ...]], half: bool = False,
                    metadata: Mapping[str, str] | None = None) -> bytes:
    return safetensors({name: ("F16" if half else "F32", shape, floats(shape, random, half)) for name, shape in shapes.items()}, metadata)


def adapter_config(**changes: object) -> dict[str, object]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | changes

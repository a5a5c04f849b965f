"""The config.json of a Hugging Face folder."""
from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

from lora_bench.engine.base_file import FormatError

from .. import families, tiny
from ..bench import BaseBench, write_files
from ..mutations import mutate_json
from ..target import Run, Target

SCALINGS = [{"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}, {"rope_type": "default"}, families.LLAMA3,
            families.YARN, families.LONGROPE]
WORDS = [
    *tiny.CONFIG, "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types", "rope_scaling", "rope_parameters",
    "partial_rotary_factor",
    "auto_map", "quantization_config", "text_config", "torch_dtype", "dtype", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling", "no_rope_layers", "no_rope_layer_interval",
    "pad_token_id",
    "linear", "dynamic", "llama3", "yarn", "longrope", "factor", "rope_type", "silu", "gelu_pytorch_tanh", "sliding_attention",
    "full_attention",
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "phi3", "smollm3", "olmo2", "mixtral",
    "original_max_position_embeddings",
    "max_window_layers", "clip_qkv", "num_experts", "num_local_experts", "hidden_activation",
]


def seeds() -> list[bytes]:
    configs = [tiny.CONFIG, *(tiny.CONFIG | {"rope_scaling": scaling} for scaling in SCALINGS)]
    configs += [tiny.CONFIG | {"rope_parameters": {"rope_theta": 1e4} | scaling} for scaling in SCALINGS[:1]]
    configs += [families.config(kind) for kind in families.CONFIGS]
    configs.append(tiny.CONFIG | {"eos_token_id": [2, 4], "sliding_window": 16})
    return [json.dumps(config).encode() for config in configs]


def prepare(folder: Path) -> Run:
    """The weights beside a config are those of the architecture that it names."""
    bench = BaseBench()
    files = tiny.base_files(Random(1))
    bases = {kind: write_files(folder / "base" / kind, files | {"model.safetensors": families.weights(kind)}) for kind in families.CONFIGS}

    def run(data: bytes) -> None:
        named = re.search(rb'"model_type": "(\w+)"', data)
        base = bases.get(named[1].decode() if named else "llama", bases["llama"])
        (base / "config.json").write_bytes(data)
        bench.try_base(base)

    return run


TARGET = Target(
    seeds, lambda data, other, random: mutate_json(data, other, random, WORDS), prepare, (FormatError, OSError),
    lambda folder: str(folder / "base"))

"""An adapter as mlx-lm saves it: the config in the first line of an input, the weights behind it."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from .. import peft_folder, tiny
from ..bench import AdapterBench, write_files
from ..mutations import mutate_json, mutate_safetensors
from ..target import Run, Target

WORDS = ["fine_tune_type", "lora", "dora", "full", "lora_parameters", "scale", "rank", "alpha", "dropout", "keys", "num_layers", "model",
         "self_attn.q_proj"]
NAMES = ["model.layers.0.self_attn.q_proj.lora_a", "model.layers.0.self_attn.q_proj.lora_b", "model.layers.0.self_attn.q_proj.m",
         "lm_head.lora_a",
         "model.embed_tokens.lora_a", "model.embed_tokens.lora_b", "model.layers.9.self_attn.q_proj.lora_a", "F32", "BF16", "dtype",
         "shape"]


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    config, weights = peft_folder.split(data)
    if random.random() < 0.5:
        return peft_folder.join(mutate_json(config, b"{}", random, WORDS), weights)
    return peft_folder.join(config, mutate_safetensors(weights, peft_folder.split(other)[1], random, NAMES))


def seeds() -> list[bytes]:
    random, result = Random(1), []
    for kind in ("lora", "dora"):
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(tiny.LAYERS):
            for name in ("self_attn.q_proj", "self_attn.v_proj"):
                outputs, inputs = tiny.module_shapes()[name]
                path = f"model.layers.{layer}.{name}"
                shapes |= {f"{path}.lora_a": (inputs, 4),
                           f"{path}.lora_b": (4, outputs)} | ({f"{path}.m": (outputs,)} if kind == "dora" else {})
        config = {"fine_tune_type": kind, "model": "some/model", "num_layers": 2,
                  "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
        result.append(peft_folder.join(json.dumps(config).encode(), tiny.adapter_weights(random, shapes)))
    return result


def prepare(folder: Path) -> Run:
    bench = AdapterBench(folder)
    adapter = write_files(folder / "adapter", {})

    def run(data: bytes) -> None:
        config, weights = peft_folder.split(data)
        (adapter / "adapter_config.json").write_bytes(config)
        (adapter / "adapters.safetensors").write_bytes(weights)
        bench.try_adapter(adapter)

    return run


TARGET = Target(seeds, mutate, prepare, peft_folder.DOCUMENTED, peft_folder.names)

"""A PEFT folder as one input: the config in the first line, the weights behind it."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.weights.files import FormatError

from . import tiny
from .bench import AdapterBench, write_files
from .target import Run

DOCUMENTED = (FormatError, AdapterError, OSError)
_EMBED, _HEAD, _ROWS = "base_model.model.model.embed_tokens", "base_model.model.lm_head", len(tiny.TOKENS)
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def join(config: bytes, weights: bytes) -> bytes:
    return config.replace(b"\n", b" ") + b"\n" + weights


def split(data: bytes) -> tuple[bytes, bytes]:
    config, _, weights = data.partition(b"\n")
    return config, weights


def seeds() -> list[bytes]:
    """Every kind of content that a PEFT adapter may have, each with the config that belongs to it."""
    random = Random(1)
    plain = tiny.adapter_shapes()
    outputs = {name: shape[0] for name, shape in plain.items() if name.endswith("lora_B.weight")}
    kinds = [
        ({}, plain), ({"use_rslora": True, "init_lora_weights": True, "revision": None}, plain),
        ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {".*v_proj": 2.5}}, plain), ({"target_modules": ".*(q|v)_proj"}, plain),
        ({"target_modules": "all-linear", "exclude_modules": ["k_proj"]}, tiny.adapter_shapes(_ALL[:1] + _ALL[2:])),
        ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, plain), ({"alora_invocation_tokens": [3, 5]}, plain),
        ({"r": 40, "lora_alpha": 1}, tiny.adapter_shapes(rank=40)), ({"target_modules": list(_ALL), "r": 1}, tiny.adapter_shapes(_ALL, 1)),
        ({"use_dora": True}, plain | {name.replace("lora_B.weight", "lora_magnitude_vector"): (rows,) for name, rows in outputs.items()}),
        ({"lora_bias": True}, plain | {name.replace("weight", "bias"): (rows,) for name, rows in outputs.items()}),
        ({"bias": "lora_only"}, plain | {name.replace("lora_B.weight", "bias"): (rows,) for name, rows in outputs.items()}),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
         plain | {f"{_EMBED}.lora_embedding_A": (4, _ROWS), f"{_EMBED}.lora_embedding_B": (tiny.HIDDEN, 4)}),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]},
         plain | {f"{_HEAD}.lora_A.weight": (4, tiny.HIDDEN), f"{_HEAD}.lora_B.weight": (_ROWS, 4)}),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, plain | {f"{path}.weight": (_ROWS, tiny.HIDDEN) for path in (_EMBED, _HEAD)}),
        ({"modules_to_save": ["embed_tokens", "lm_head"]},
         plain | {f"{path}.weight": (_ROWS + 2, tiny.HIDDEN) for path in (_EMBED, _HEAD)}),
        ({"modules_to_save": ["norm"]}, plain | {"base_model.model.model.norm.weight": (tiny.HIDDEN,)}),
        ({"trainable_token_indices": [1, 3]}, plain | {f"{_EMBED}.token_adapter.trainable_tokens_delta": (2, tiny.HIDDEN)}),
        ({"trainable_token_indices": {"embed_tokens": [1, 3]}},
         plain | {f"{_EMBED}.token_adapter.trainable_tokens_delta": (2, tiny.HIDDEN)}),
        ({"layer_replication": [[0, 2], [1, 2]]}, plain), ({"target_parameters": ["mlp.experts"]}, plain),
        ({"init_lora_weights": "pissa"}, plain),
        ({"auto_mapping": {"base_model_class": "x", "parent_library": "os"}, "eva_config": {"rho": 2.0}, "loftq_config": {}}, plain),
    ]
    files = [(config, tiny.adapter_weights(random, shapes)) for config, shapes in kinds]
    files += [
        ({}, tiny.adapter_weights(random, plain, True, {"format": "pt"})),
        ({}, tiny.adapter_weights(random, {name.replace("weight", "default.weight"): shape for name, shape in plain.items()})),
        ({}, tiny.adapter_weights(
            random, {name.replace(".model.layers", ".language_model.layers"): shape for name, shape in plain.items()})),
    ]
    return [join(json.dumps(tiny.adapter_config(**config)).encode(), weights) for config, weights in files]


def prepare(folder: Path) -> Run:
    bench = AdapterBench(folder)
    adapter = write_files(folder / "adapter", {})

    def run(data: bytes) -> None:
        config, weights = split(data)
        (adapter / "adapter_config.json").write_bytes(config)
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        bench.try_adapter(adapter)

    return run


def names(folder: Path) -> str:
    return str(folder / "adapter")

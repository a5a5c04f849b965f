"""An adapter in one safetensors file, its config or its rank and alpha in the file's metadata."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from .. import peft_folder, tiny
from ..bench import AdapterBench
from ..mutations import mutate_json, mutate_safetensors
from ..target import Run, Target
from .adapter_config import WORDS as CONFIG_WORDS

WORDS = ["adapter_config", "peft_config", "lora_config", "lora_adapter_metadata", "r", "rank", "lora_alpha", "alpha", "ss_network_dim",
         "ss_network_alpha", "format",
         "__metadata__", "8", "8.0", "1e999", "nan", "-4", "4.5", "F32", "BF16"]


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    """Mostly the metadata, and the config that is JSON in it."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.6:
        try:
            header = json.loads(data[8:8 + length])
            metadata = header["__metadata__"]
            key = random.choice(list(metadata))
            if metadata[key].startswith("{") and random.random() < 0.7:
                metadata[key] = mutate_json(metadata[key].encode(), b"{}", random, CONFIG_WORDS).decode("utf-8", "replace")
            else:
                header["__metadata__"] = json.loads(mutate_json(json.dumps(metadata).encode(), b"{}", random, WORDS))
            text = json.dumps(header).encode()
            return len(text).to_bytes(8, "little") + text + data[8 + length:]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            pass
    return mutate_safetensors(data, other, random, WORDS)


def seeds() -> list[bytes]:
    random, shapes = Random(1), tiny.adapter_shapes()
    metadata = [{"adapter_config": json.dumps(tiny.adapter_config())},
                {"lora_adapter_metadata": json.dumps(tiny.adapter_config(use_rslora=True))},
                {"r": "4", "lora_alpha": "8"}, {"ss_network_dim": "4", "ss_network_alpha": "2.5", "ss_tag": "x"}]
    return [tiny.adapter_weights(random, shapes, metadata=entries) for entries in metadata]


def prepare(folder: Path) -> Run:
    bench = AdapterBench(folder)
    path = folder / "x.safetensors"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        bench.try_adapter(path)

    return run


TARGET = Target(seeds, mutate, prepare, peft_folder.DOCUMENTED, lambda folder: "x.safetensors")

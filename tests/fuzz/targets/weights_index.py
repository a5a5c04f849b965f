"""The index of a base's shards: which file holds which tensor, and what a file may be called."""
from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

from lora_bench.engine.base_file import FormatError

from .. import tiny
from ..bench import BaseBench, write_files
from ..mutations import mutate_json
from ..target import Run, Target

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WORDS = [*SHARDS, "model-00001-of-00001.safetensors", "../outside.safetensors", "./" + SHARDS[0], "pipe.safetensors", "folder.safetensors",
         "link.safetensors",
         "weight_map", "metadata", "total_size", "model.norm.weight", "lm_head.weight", "/dev/zero", "config.json", SHARDS[0].upper()]


def shards() -> dict[str, bytes]:
    random, shapes = Random(1), tiny.base_shapes()
    names = list(shapes)
    halves = names[::2], names[1::2]
    return {file: tiny.safetensors({name: ("F32", shapes[name], tiny.floats(shapes[name], random)) for name in half})
            for file, half in zip(SHARDS, halves, strict=True)}


def seeds() -> list[bytes]:
    names = list(tiny.base_shapes())
    return [json.dumps({"metadata": {"total_size": 1}, "weight_map": {name: SHARDS[i % 2] for i, name in enumerate(names)}}).encode()]


def prepare(folder: Path) -> Run:
    """Beside the shards lie a pipe, a folder and a link to a file outside, for the index to name."""
    bench = BaseBench()
    files = tiny.base_files(Random(1)) | shards()
    (folder / "outside.safetensors").write_bytes(files.pop("model.safetensors"))
    base = write_files(folder / "base", files)
    os.mkfifo(base / "pipe.safetensors")
    (base / "folder.safetensors").mkdir()
    (base / "link.safetensors").symlink_to("../outside.safetensors")

    def run(data: bytes) -> None:
        (base / "model.safetensors.index.json").write_bytes(data)
        bench.try_base(base)

    return run


TARGET = Target(
    seeds, lambda data, other, random: mutate_json(data, other, random, WORDS), prepare, (FormatError, OSError),
    lambda folder: str(folder / "base"))

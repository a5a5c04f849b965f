"""The weights of a Hugging Face folder as a safetensors file."""
from __future__ import annotations

from pathlib import Path
from random import Random

from lora_bench.engine.base_file import FormatError

from .. import tiny
from ..bench import BaseBench, write_files
from ..mutations import mutate_safetensors
from ..target import Run, Target

WORDS = ["F32", "F16", "BF16", "F64", "I8", "BOOL", "__metadata__", "dtype", "shape", "data_offsets", "lm_head.weight", "model.norm.weight",
         "model.layers.0.self_attn.q_proj.bias", "model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
         "model.layers.0.self_attn.q_norm.weight", "embed_tokens.weight", "model.layers.0.block_sparse_moe.gate.weight"]


def seeds() -> list[bytes]:
    random = Random(1)
    shapes = tiny.base_shapes()
    half = {name: ("F16", shape, tiny.floats(shape, random, half=True)) for name, shape in shapes.items()}
    bare = {name.removeprefix("model."): ("F32", shape, tiny.floats(shape, random)) for name, shape in shapes.items()}
    return [tiny.base_weights(random), tiny.safetensors(half), tiny.safetensors(bare)]


def prepare(folder: Path) -> Run:
    bench = BaseBench()
    base = write_files(folder / "base", tiny.base_files(Random(1)))

    def run(data: bytes) -> None:
        (base / "model.safetensors").write_bytes(data)
        bench.try_base(base)

    return run


TARGET = Target(
    seeds, lambda data, other, random: mutate_safetensors(data, other, random, WORDS), prepare, (FormatError, OSError),
    lambda folder: str(folder / "base"))

"""A GGUF file as an adapter of a tiny base."""
from __future__ import annotations

import math
import struct
from pathlib import Path
from random import Random

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.weights.files import FormatError

from .. import gguf_bytes, tiny
from ..bench import AdapterBench
from ..target import Run, Target

KEYS = ["general.type", "general.architecture", "general.alignment", "general.name", "adapter.type", "adapter.lora.alpha",
        "adapter.lora.task_name",
        "adapter.lora.prompt_prefix", "adapter.alora.invocation_tokens", "general.base_model.0.name", "general.license", "split.count"]
NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
         "down_proj": "ffn_down"}


def adapter(kind: str = "F32", rank: int = 4, targets: tuple[str, ...] = ("q_proj", "v_proj"), version: int = 3, order: str = "<",
            extra: dict[str, gguf_bytes.Tensor] | None = None, **pairs: object) -> bytes:
    """As llama.cpp's converter writes one: pairs of `weight.lora_a` [r, in] and `weight.lora_b` [out, r]."""
    random = Random(rank)
    metadata = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 8.0} | pairs
    tensors = {}
    for layer in range(tiny.LAYERS):
        for name, (outputs, inputs) in tiny.module_shapes().items():
            last = name.rpartition(".")[2]
            if last in targets:
                for half, shape in (("a", (rank, inputs)), ("b", (outputs, rank))):
                    tensors[f"blk.{layer}.{NAMES[last]}.weight.lora_{half}"] = kind, shape, _data(kind, shape, random, order)
    return gguf_bytes.write(metadata, tensors | (extra or {}), version, order)


def _data(kind: str, shape: tuple[int, int], random: Random, order: str) -> bytes:
    """Finite numbers of a type."""
    count = math.prod(shape)
    if kind == "Q8_0":
        return b"".join(struct.pack(order + "e", 0.01) + random.randbytes(32) for _ in range(count // 32))
    values = [random.uniform(-0.3, 0.3) for _ in range(count)]
    if kind == "BF16":
        return b"".join(struct.pack(order + "f", value)[:2] if order == ">" else struct.pack(order + "f", value)[2:] for value in values)
    return struct.pack(f"{order}{count}{'e' if kind == 'F16' else 'f'}", *values)


def seeds() -> list[bytes]:
    rows = len(tiny.TOKENS)
    head = {"output.weight.lora_a": ("F32", (4, tiny.HIDDEN), bytes(16 * tiny.HIDDEN)),
            "output.weight.lora_b": ("F32", (rows, 4), bytes(16 * rows))}
    embedding = {"token_embd.weight.lora_a": ("F32", (rows, 4), bytes(16 * rows)),
                 "token_embd.weight.lora_b": ("F32", (tiny.HIDDEN, 4), bytes(16 * tiny.HIDDEN))}
    return [
        adapter(), adapter("F16"), adapter("BF16"), adapter("Q8_0", rank=32), adapter(targets=tuple(NAMES)), adapter(version=2),
        adapter(order=">"),
        adapter(**{"adapter.alora.invocation_tokens": [3, 5, 6]}), adapter(extra=head), adapter(extra=embedding),
        adapter(**{"adapter.lora.task_name": "a task", "adapter.lora.prompt_prefix": "say: ", "general.name": "it",
                   "general.license": "mit"}),
    ]


def prepare(folder: Path) -> Run:
    bench = AdapterBench(folder)
    path = folder / "x.gguf"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        bench.try_adapter(path)

    return run


TARGET = Target(
    seeds, lambda data, other, random: gguf_bytes.mutate(data, other, random, KEYS), prepare, (FormatError, AdapterError, OSError),
    lambda folder: "x.gguf")

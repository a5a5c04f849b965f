"""The tokenizer.json in an adapter's folder, for adapters with rows for more tokens than the base has."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from .. import peft_folder, tiny
from ..bench import AdapterBench, write_files
from ..mutations import mutate_json
from ..target import Run, Target
from .tokenizer_json import WORDS

ROWS = len(tiny.TOKENS) + 2
ADDED = [{"id": len(tiny.TOKENS) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
          "special": i == 0}
         for i, text in enumerate(("<|tool|>", "plain_word"))]


def seeds() -> list[bytes]:
    added = tiny.TOKENIZER["added_tokens"]
    files = [tiny.TOKENIZER | {"added_tokens": [*added, *ADDED]}, tiny.TOKENIZER, tiny.TOKENIZER | {"added_tokens": [*added, ADDED[0]]}]
    return [json.dumps(file).encode() for file in files]


def prepare(folder: Path) -> Run:
    bench = AdapterBench(folder)
    shapes = tiny.adapter_shapes() | {f"base_model.model.{name}.weight": (ROWS, tiny.HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    adapter = write_files(folder / "adapter", {
        "adapter_config.json": json.dumps(tiny.adapter_config(modules_to_save=["embed_tokens", "lm_head"])).encode(),
        "adapter_model.safetensors": tiny.adapter_weights(Random(1), shapes),
        "tokenizer_config.json": json.dumps(tiny.TOKENIZER_CONFIG).encode()})

    def run(data: bytes) -> None:
        (adapter / "tokenizer.json").write_bytes(data)
        bench.try_adapter(adapter)

    return run


TARGET = Target(
    seeds, lambda data, other, random: mutate_json(data, other, random, [*WORDS, "<|tool|>", "plain_word"]), prepare,
    peft_folder.DOCUMENTED,
    peft_folder.names)

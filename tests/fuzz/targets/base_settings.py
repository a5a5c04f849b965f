"""The small JSON files around a base, all of them in one object by file name."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from lora_bench.engine.base_file import FormatError

from .. import tiny
from ..bench import BaseBench, write_files
from ..mutations import blind, json_text, json_tree
from ..target import Run, Target

FILES = {
    "tokenizer_config.json": tiny.TOKENIZER_CONFIG | {
        "add_bos_token": True, "added_tokens_decoder": {"1": {"content": "<s>", "special": True, "lstrip": False}},
        "tokenizer_class": "LlamaTokenizer"},
    "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "additional_special_tokens": ["<|im_start|>"]},
    "generation_config.json": {"eos_token_id": [2, 4], "bos_token_id": 1, "temperature": 0.6},
    "added_tokens.json": {"<|im_end|>": 4}, "chat_template.json": {"chat_template": tiny.TEMPLATE},
}
WORDS = [*FILES, *tiny.TOKENS[:6], "bos_token", "eos_token", "unk_token", "pad_token", "eos_token_id", "chat_template", "content",
         "default", "name", "template",
         "add_bos_token", "add_eos_token", "auto_map", "tokenizer_class", "{{ messages }}", "rag", "tool_use",
         "{% for x in range(10**9) %}{% endfor %}"]


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    """Changed as one tree; a file's own text is broken when it is written."""
    try:
        value = json.loads(data)
        for _ in range(random.choice((1, 1, 2, 3))):
            value = json_tree(value, random, WORDS)
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return blind(data, other, random)


def prepare(folder: Path) -> Run:
    bench = BaseBench()
    base = write_files(folder / "base", tiny.base_files(Random(1)))

    def run(data: bytes) -> None:
        try:
            files = json.loads(data)
        except (ValueError, RecursionError):
            files = {"tokenizer_config.json": data.decode("latin-1")}
        random = Random(len(data))
        for name in FILES:
            (base / name).unlink(missing_ok=True)
            if isinstance(files, dict) and name in files:
                (base / name).write_bytes(json_text(files[name], random))
        bench.try_base(base)

    return run


def seeds() -> list[bytes]:
    several = {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "x"}]}}
    return [json.dumps(FILES).encode(), json.dumps(several).encode()]


TARGET = Target(
    seeds, mutate, prepare, (FormatError, OSError), lambda folder: str(folder / "base"), seconds=5.0)

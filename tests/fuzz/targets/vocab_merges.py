"""vocab.json and merges.txt in a Hugging Face folder that has no tokenizer.json: the first line of an input is the vocabulary."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from lora_bench.engine.base_file import FormatError, open_base
from lora_bench.engine.tokenizer import Tokenizer

from .. import tiny
from ..bench import use_tokenizer, write_files
from ..mutations import blind, mutate_json
from ..target import Run, Target

WORDS = [*tiny.TOKENS, "Ġt", "[PAD49]"]


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    vocab, _, merges = data.partition(b"\n")
    if random.random() < 0.6:
        return mutate_json(vocab, other.partition(b"\n")[0], random, WORDS).replace(b"\n", b" ") + b"\n" + merges
    lines = merges.split(b"\n")
    place = random.randrange(len(lines))
    lines[place:place + 1] = random.choice(([], [b"t  h"], [b"#version: 9"], [b" "], [lines[place]] * 300, [b"a"], [b"a b", b"ab c"],
                                            [blind(lines[place], other, random)]))
    return vocab + b"\n" + b"\n".join(lines)


def seeds() -> list[bytes]:
    vocab = json.dumps({text: i for i, text in enumerate(tiny.TOKENS)}).encode()
    return [vocab + b"\n#version: 0.2\nt h\nh e\n", json.dumps({text: i for i, text in enumerate(tiny.TOKENS[:-2])}).encode() + b"\n"]


def prepare(folder: Path) -> Run:
    files = tiny.base_files(Random(1))
    del files["tokenizer.json"]
    files["tokenizer_config.json"] = json.dumps(tiny.TOKENIZER_CONFIG | {"tokenizer_class": "Qwen2Tokenizer"}).encode()
    base = write_files(folder / "base", files)

    def run(data: bytes) -> None:
        vocab, _, merges = data.partition(b"\n")
        (base / "vocab.json").write_bytes(vocab)
        (base / "merges.txt").write_bytes(merges)
        use_tokenizer(Tokenizer(open_base(base)))

    return run


TARGET = Target(seeds, mutate, prepare, (FormatError, OSError), lambda folder: str(folder / "base"))

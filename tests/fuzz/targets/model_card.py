"""The README.md of an adapter's folder: whatever it holds, the adapter loads."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from .. import peft_folder, tiny
from ..bench import AdapterBench, sure, write_files
from ..mutations import TEXTS, blind
from ..target import Run, Target

CARD = ("---\nlibrary_name: peft\nbase_model: some/model\nlicense: \"mit\"\ntags:\n- lora\n- text-generation\nlanguage: [en, fr]\n"
        "model-index:\n  - name: x\n    results: []\n---\n# A card\n")


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    if random.random() < 0.4:
        return blind(data, other, random)
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    text = random.choice(TEXTS).encode("utf-8", "surrogatepass")
    lines[place:place + 1] = random.choice(([], [lines[place]] * 500, [b"- " + text], [b"tags: " + text], [text + b": x"], [b"---"],
                                            [b"a: [" + text], [b"\x85"], [b"x" * 70_000]))
    return b"\n".join(lines)


def prepare(folder: Path) -> Run:
    bench = AdapterBench(folder)
    adapter = write_files(folder / "adapter", {
        "adapter_config.json": json.dumps(tiny.adapter_config()).encode(),
        "adapter_model.safetensors": tiny.adapter_weights(Random(1), tiny.adapter_shapes())})

    def run(data: bytes) -> None:
        (adapter / "README.md").write_bytes(data)
        sure("a folder with an odd card", lambda: bench.try_adapter(adapter))

    return run


TARGET = Target(lambda: [CARD.encode(), b"# no front matter\n"], mutate, prepare, peft_folder.DOCUMENTED, peft_folder.names)

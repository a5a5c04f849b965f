"""The weights of a PEFT adapter as a pickle, zipped as torch writes it today or bare as it did once."""
from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from random import Random

import torch

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.weights.files import FormatError

from .. import tiny
from ..bench import AdapterBench, write_files
from ..mutations import blind
from ..target import Run, Target

SNIPPETS = [b"cposix\nmknod\n(VCANARY\ntR", b"cbuiltins\nexec\n(Vopen('CANARY','w')\ntR", b"ctorch\nload\n",
            b"ctorch._utils\n_rebuild_tensor_v2\n", b"}", b"]", b"(", b"t", b"R", b"u", b"s",
            b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"J\xff\xff\xff\x7f", b"h\x00", b"q\x00", b"Q", b"ctorch\nsparse_coo_tensor\n", b"K\x01",
            b"M\xff\xff", b"ccollections\nOrderedDict\n", b")", b"b", b"\x88", b"N"]


def seeds() -> list[bytes]:
    torch.manual_seed(1)
    shapes = tiny.adapter_shapes()
    plain = {name: torch.randn(shape) for name, shape in shapes.items()}
    views = {name: torch.randn(shape[::-1]).t() for name, shape in shapes.items()}
    wide = {name: torch.randn(1).expand(shape) for name, shape in shapes.items()}
    half = {name: tensor.half() for name, tensor in plain.items()}
    result = []
    for state in (plain, views, wide, half):
        for zipped in (True, False):
            stream = io.BytesIO()
            torch.save(state, stream, _use_new_zipfile_serialization=zipped)
            result.append(stream.getvalue())
    return result


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    """In a zip mostly the pickle inside, the zip's own sums right again; else blind changes with pieces of pickles."""
    if data[:4] == b"PK\3\4" and random.random() < 0.7:
        try:
            return _rezipped(data, other, random)
        except (zipfile.BadZipFile, ValueError, KeyError, EOFError, OSError, RuntimeError):
            pass
    return _pickle(data, other, random)


def _rezipped(data: bytes, other: bytes, random: Random) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            content, name = old.read(entry), entry.filename
            chance = random.random()
            if name.endswith("data.pkl"):
                content = _pickle(content, other, random)
            elif chance < 0.03:
                continue
            elif chance < 0.06:
                content = blind(content, other, random)
            elif chance < 0.08:
                name = random.choice(("../CANARY", "/tmp/CANARY", "archive/data/0", "archive/.data/x", name + "x"))
            deflate = zipfile.ZIP_DEFLATED if random.random() < 0.02 else zipfile.ZIP_STORED
            new.writestr(name, content, deflate)
    return stream.getvalue()


def _pickle(data: bytes, other: bytes, random: Random) -> bytes:
    if random.random() < 0.5:
        place = random.randrange(min(len(data), 4096) or 1)
        return data[:place] + random.choice(SNIPPETS) + data[place + random.choice((0, 0, 1, 4)):]
    return blind(data, other, random)


def prepare(folder: Path) -> Run:
    bench = AdapterBench(folder)
    adapter = write_files(folder / "adapter", {"adapter_config.json": json.dumps(tiny.adapter_config()).encode()})

    def run(data: bytes) -> None:
        (adapter / "adapter_model.bin").write_bytes(data)
        bench.try_adapter(adapter)

    return run


TARGET = Target(seeds, mutate, prepare, (FormatError, AdapterError, OSError), lambda folder: str(folder / "adapter"))

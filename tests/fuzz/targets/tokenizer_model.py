"""SentencePiece's tokenizer.model in a Hugging Face folder that has no tokenizer.json."""
from __future__ import annotations

import struct
from pathlib import Path
from random import Random

from lora_bench.engine.base_file import FormatError, open_base
from lora_bench.engine.tokenizer import Tokenizer

from .. import tiny
from ..bench import use_tokenizer, write_files
from ..mutations import NASTY, TEXTS, blind
from ..target import Run, Target

Fields = list[tuple[int, int, bytes]]
"""number, wire type, what follows the key"""


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes([*result, value])


def sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def message(fields: Fields) -> bytes:
    return b"".join(varint(number << 3 | kind) + content for number, kind, content in fields)


def model(kind: int = 2, **normalizer: object) -> bytes:
    """A ModelProto of tiny.PIECES; `kind` 1 is unigram, 2 BPE."""
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tiny.PIECES) - 259)
    pieces = [message([(1, 2, sized(text.encode())), (2, 5, struct.pack("<f", -i if i > 258 else 0.0)), (3, 0, varint(kinds[i]))])
              for i, text in enumerate(tiny.PIECES)]
    trainer = message([(3, 0, varint(kind)), (35, 0, varint(1))])
    rules = message([(1, 2, sized(b"identity")), (3, 0, varint(1)), (4, 0, varint(0)), (5, 0, varint(1)),
                     *((2, 2, sized(value)) for value in normalizer.values())])
    return message([*((1, 2, sized(piece)) for piece in pieces), (2, 2, sized(trainer)), (3, 2, sized(rules))])


def fields_of(data: bytes) -> Fields:
    """The fields of a message that is good or nearly so."""
    found: Fields = []
    place = 0
    while place < len(data):
        key, place = _read(data, place)
        start = place
        match key & 7:
            case 0:
                _, place = _read(data, place)
            case 2:
                size, place = _read(data, place)
                place += size
            case kind:
                place += {5: 4, 1: 8}[kind]
        found.append((key >> 3, key & 7, data[start:place]))
    return found


def _read(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, place, shift = value | (byte & 127) << shift, place + 1, shift + 7
        if byte < 128:
            return value, place


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    """Fields of the message, or of one inside it, taken away, doubled, exchanged or given other values; else blind changes."""
    if random.random() < 0.75:
        try:
            return _changed(data, random)
        except (IndexError, KeyError, MemoryError, OverflowError):
            pass
    return blind(data, other, random, head=1 << 16)


def _changed(data: bytes, random: Random, depth: int = 0) -> bytes:
    fields = fields_of(data)
    if not fields:
        return data
    place = random.randrange(max(0, len(fields) - 3), len(fields)) if random.random() < 0.3 else random.randrange(len(fields))
    number, kind, content = fields[place]
    chance = random.random()
    if kind == 2 and depth < 2 and chance < 0.5:
        _, start = _read(content, 0)
        fields[place] = number, 2, sized(_changed(content[start:], random, depth + 1))
    elif chance < 0.6:
        del fields[place:place + random.choice((1, 1, 10, 200))]
    elif chance < 0.7:
        fields[place:place] = fields[place:place + 5] * random.choice((1, 2, 50))
    elif chance < 0.8:
        fields[place] = random.choice((1, 2, 3, 4, 5, 10, 35, 0, 1 << 28)), kind, content
    else:
        fields[place] = random.choice(((number, 0, varint(random.choice(NASTY))),
                                       (number, 2, sized(random.choice(TEXTS).encode("utf-8", "surrogatepass"))),
                                       (number, 5, random.randbytes(4)), (number, 1, random.randbytes(8)),
                                       (number, 2, varint(random.choice(NASTY))),
                                       (number, 2, sized(random.randbytes(random.choice((4, 64, 1024)))))))
    return message(fields)


def seeds() -> list[bytes]:
    charsmap = struct.pack("<I", 1024) + bytes(1024) + b"a\0"
    return [model(), model(1), model(charsmap=charsmap), model(1, charsmap=charsmap)]


def prepare(folder: Path) -> Run:
    rows, files = len(tiny.PIECES), tiny.base_files(Random(1))
    del files["tokenizer.json"]
    random, shapes = Random(1), tiny.base_shapes()
    shapes |= {name: (rows, tiny.HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    files["model.safetensors"] = tiny.safetensors({name: ("F32", shape, tiny.floats(shape, random)) for name, shape in shapes.items()})
    files["config.json"] = files["config.json"].replace(f'"vocab_size": {len(tiny.TOKENS)}'.encode(), f'"vocab_size": {rows}'.encode())
    base = write_files(folder / "base", files)

    def run(data: bytes) -> None:
        (base / "tokenizer.model").write_bytes(data)
        use_tokenizer(Tokenizer(open_base(base)))

    return run


TARGET = Target(seeds, mutate, prepare, (FormatError, OSError), lambda folder: str(folder / "base"))

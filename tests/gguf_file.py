"""GGUF files of any byte order, version and tensor type, written byte by byte: what the gguf package's writer cannot make."""
from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lora_bench.engine.models.facts import ModelFacts, tensor_shapes
from lora_bench.engine.models.names import gguf_name
from lora_bench.engine.weights.entry import BLOCKS
from lora_bench.engine.weights.gguf import TYPES

NUMBERS = {name: number for number, name in TYPES.items()}
HALVES = {"F16": (0,), "BF16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
          "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0, 2)}
"""where the numbers of 16 bits lie in a block"""
WORDS = {"F32": (0,), "Q5_0": (2,), "Q5_1": (4,)}
"""where those of 32 bits lie: a float, and the fifth bits that ggml reads as one number"""
FACTS = ModelFacts(architecture="llama", layers=1, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=50, context=64,
                   rms_eps=1e-5, rope_theta=1e4)
"""a decoder whose rows are whole blocks of every type"""
TOKENS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV", "th", "he"]
"""a byte-level vocabulary of FACTS.vocab"""


def random_bytes(kind: str, shape: tuple[int, ...], chance: np.random.Generator, spread: float = 1.0) -> np.ndarray:
    """A tensor as it lies in a little-endian file, uint8 [blocks, block_bytes]; its scales are moderate numbers times `spread`."""
    elements, size = BLOCKS[kind]
    count = int(np.prod(shape)) // elements
    if kind == "F32":
        return chance.standard_normal(count, np.float32).view(np.uint8).reshape(count, 4)
    blocks = chance.integers(0, 256, (count, size), np.uint8)
    for start in HALVES.get(kind, ()):
        if kind == "BF16":
            halves = (chance.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif (kind, start) == ("IQ4_XS", 2):
            continue
        else:
            halves = (chance.standard_normal(count) * (spread / (50 if elements < 256 else 2000))).astype(np.float16)
        blocks[:, start:start + 2] = halves.view(np.uint8).reshape(count, 2)
    if kind == "MXFP4":
        blocks[:, 0] = chance.integers(118, 126, count)
    return blocks


def swapped(kind: str, blocks: np.ndarray) -> np.ndarray:
    """The same tensor as it lies in a big-endian file."""
    out = blocks.copy()
    for width, starts in ((2, HALVES.get(kind, ())), (4, WORDS.get(kind, ()))):
        for start in starts:
            out[:, start:start + width] = blocks[:, start:start + width][:, ::-1]
    return out


def write_gguf(path: Path, kinds: Mapping[str, str], chance: np.random.Generator, order: str = "<", version: int = 3, alignment: int = 32,
               spread: float = 1.0) -> Path:
    """A base of FACTS and random blocks: `kinds` maps the end of a canonical module to a type, "" is the type of the other matrices.

    `spread` as in `random_bytes`: matrices of small numbers do not amplify what is rounded.
    """
    f = FACTS
    tensors = []
    for name, shape in tensor_shapes(f).items():
        named = (kind for end, kind in kinds.items() if end and name.removesuffix(".weight").endswith(end))
        kind = next(named, kinds.get("", "F32")) if len(shape) == 2 else "F32"
        tensors.append((gguf_name(name, f), shape, kind, random_bytes(kind, shape, chance, spread)))
    counts = {
        "block_count": f.layers, "context_length": f.context, "embedding_length": f.hidden, "feed_forward_length": f.intermediate,
        "attention.head_count": f.heads, "attention.head_count_kv": f.kv_heads, "attention.key_length": f.head_dim,
        "attention.value_length": f.head_dim, "rope.dimension_count": f.head_dim,
    }
    pairs = [_pair(order, "general.architecture", 8, _text(order, f.architecture)),
             _pair(order, "general.alignment", 4, _u32(order, alignment))]
    pairs += [_pair(order, f"{f.architecture}.{key}", 4, _u32(order, value)) for key, value in counts.items()]
    pairs += [_pair(order, f"{f.architecture}.attention.layer_norm_rms_epsilon", 6, struct.pack(order + "f", f.rms_eps))]
    pairs += [_pair(order, "tokenizer.ggml.model", 8, _text(order, "gpt2")), _pair(order, "tokenizer.ggml.pre", 8, _text(order, "gpt-2"))]
    for key, texts in (("tokens", TOKENS), ("merges", ["t h", "h e"])):
        pairs += [_pair(order, f"tokenizer.ggml.{key}", 9,
                        struct.pack(order + "IQ", 8, len(texts)) + b"".join(_text(order, t) for t in texts))]
    types = struct.pack(f"{order}IQ{f.vocab}i", 5, f.vocab, *[1] * f.vocab)
    pairs += [_pair(order, "tokenizer.ggml.token_type", 9, types)]
    chance.shuffle(order_of := list(range(len(tensors))))
    places, body = {}, b""
    for index in order_of:  # the data in another order than the places
        name, shape, kind, blocks = tensors[index]
        data = (swapped(kind, blocks) if order == ">" else blocks).tobytes()
        places[index] = (_text(order, name) + struct.pack(f"{order}I{len(shape)}Q", len(shape), *shape[::-1])
                         + struct.pack(order + "IQ", NUMBERS[kind], len(body)))
        body += data + bytes(-len(data) % alignment)
    head = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(pairs)) + b"".join(pairs)
    head += b"".join(places[index] for index in range(len(tensors)))
    path.write_bytes(head + bytes(-len(head) % alignment) + body)
    return path


def _u32(order: str, value: int) -> bytes:
    return struct.pack(order + "I", value)


def _text(order: str, value: str) -> bytes:
    return struct.pack(order + "Q", len(value.encode())) + value.encode()


def _pair(order: str, key: str, kind: int, value: bytes) -> bytes:
    return _text(order, key) + _u32(order, kind) + value

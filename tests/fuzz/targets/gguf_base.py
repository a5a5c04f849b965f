"""A GGUF file as a base: header, facts, tokenizer, weights, and an answer."""
from __future__ import annotations

from pathlib import Path
from random import Random

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.base_file import FormatError
from lora_bench.engine.inspect import inspect_path
from lora_bench.engine.plan import memory_plan

from .. import families, gguf_bytes, tiny
from ..bench import BaseBench
from ..target import Run, Target

SMALL = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
WIDE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""types of blocks of 32 elements or less, and of 256"""
KEYS = [
    *(f"llama.{key}" for key in tiny.GGUF_SIZES), "llama.attention.key_length", "llama.attention.value_length", "llama.vocab_size",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length", "llama.rope.scaling.attn_factor",
    "llama.attention.sliding_window",
    "llama.expert_count", "llama.attn_logit_softcapping", "llama.final_logit_softcapping", "llama.attention.scale", "llama.logit_scale",
    "llama.residual_scale", "llama.embedding_scale",
    *(f"{architecture}.{key}" for architecture, (_, own) in families.GGUF.items() for key in own),
    "phi3.rope.scaling.original_context_length", "general.alignment", "general.architecture", "general.name", "general.type",
    "general.license",
    "general.file_type", "split.count", "split.no", "split.tensors.count", "tokenizer.chat_template", "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id", "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap", "adapter.type",
]


def tensors(random: Random, kind: str = "F32", hidden: int = tiny.HIDDEN, intermediate: int = tiny.INTERMEDIATE, layers: int = tiny.LAYERS,
            vocab: int = len(tiny.TOKENS), tied: bool = False) -> dict[str, gguf_bytes.Tensor]:
    """Every tensor of the tiny base; matrices of type `kind` hold noise."""
    def matrix(rows: int, columns: int) -> gguf_bytes.Tensor:
        shape = rows, columns
        return (kind, shape, tiny.floats(shape, random)) if kind == "F32" else gguf_bytes.noise(kind, shape, random)

    ones: gguf_bytes.Tensor = "F32", (hidden,), b"\0\0\x80\x3f" * hidden
    found = {"token_embd.weight": matrix(vocab, hidden), "output_norm.weight": ones}
    found |= {} if tied else {"output.weight": matrix(vocab, hidden)}
    kv = tiny.KV_HEADS * hidden // tiny.HEADS
    shapes = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, hidden),
              "ffn_gate": (intermediate, hidden), "ffn_up": (intermediate, hidden), "ffn_down": (hidden, intermediate)}
    for layer in range(layers):
        found |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        found |= {f"blk.{layer}.{name}.weight": ones for name in ("attn_norm", "ffn_norm")}
    return found


def seeds() -> list[bytes]:
    random = Random(1)
    result = [gguf_bytes.write(tiny.gguf_metadata(), tensors(random, kind)) for kind in SMALL]
    result += [gguf_bytes.write(tiny.gguf_metadata(), tensors(random), 2), gguf_bytes.write(tiny.gguf_metadata(), tensors(random), 3, ">")]
    result.append(gguf_bytes.write(tiny.gguf_metadata() | {"general.alignment": 64}, tensors(random, tied=True), alignment=64))
    factors: gguf_bytes.Tensor = "F32", (tiny.HEAD_DIM // 2,), b"\0\0\x80\x3f" * (tiny.HEAD_DIM // 2)
    result.append(gguf_bytes.write(tiny.gguf_metadata(), {"rope_freqs.weight": factors} | tensors(random)))
    spm = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None, "tokenizer.ggml.merges": None, "tokenizer.ggml.tokens": tiny.PIECES,
           "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tiny.PIECES) - 259),
           "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tiny.PIECES) - 259)],
           "tokenizer.ggml.add_space_prefix": True}
    result.append(gguf_bytes.write(_merged(spm), tensors(random, vocab=len(tiny.PIECES))))
    wide = {"llama.embedding_length": 256, "llama.feed_forward_length": 256, "llama.block_count": 1, "llama.rope.dimension_count": 64}
    result += [gguf_bytes.write(_merged(wide), tensors(random, kind, 256, 256, 1)) for kind in WIDE]
    return result + [families.gguf_file(architecture) for architecture in families.GGUF]


def _merged(changes: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in (tiny.gguf_metadata() | changes).items() if value is not None}


def prepare(folder: Path) -> Run:
    bench = BaseBench()
    path = folder / "x.gguf"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        inspect_path(path)
        memory_plan(path)
        bench.try_base(path)

    return run


TARGET = Target(
    seeds, lambda data, other, random: gguf_bytes.mutate(data, other, random, KEYS), prepare,
    (FormatError, AdapterError, OSError),  # the file may say of itself that it is an adapter
    lambda folder: "x.gguf")

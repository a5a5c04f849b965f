"""Files with several matrices of a layer in one tensor though the model here has them apart. No torch."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .models.facts import ModelFacts
from .weights.entry import TensorEntry


def split_qkv(facts: ModelFacts, tensors: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """`tensors` of a GGUF with each attn_qkv (llama.cpp's converter, --fuse-qkv) as the three tensors whose rows it holds.

    Those of another number of rows stay as they are, to be refused as what the model does not use.
    """
    if facts.fused:
        return tensors
    parts = {"attn_q": facts.q_out, "attn_k": facts.kv_out, "attn_v": facts.kv_out}
    return _split(tensors, ".attn_qkv.", {f".{part}.": rows for part, rows in parts.items()})


def split_shared_mlp(facts: ModelFacts, tensors: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """`tensors` of a granitemoehybrid folder by the usual names: each input_linear as the gate and up whose rows it holds."""
    parts = {".mlp.gate_proj.": facts.intermediate, ".mlp.up_proj.": facts.intermediate}
    renamed = {name.replace(".shared_mlp.output_linear.", ".mlp.down_proj."): entry for name, entry in tensors.items()}
    return _split(renamed, ".shared_mlp.input_linear.", parts)


def _split(tensors: Mapping[str, TensorEntry], whole: str, parts: Mapping[str, int]) -> Mapping[str, TensorEntry]:
    """Each tensor with `whole` in its name as `parts`: what stands there instead -> rows, one under the other. Nothing is read."""
    if not any(whole in name for name in tensors):
        return tensors
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if whole not in name or entry.shape[:1] != (sum(parts.values()),):
            found[name] = entry
            continue
        row_bytes, offset = entry.nbytes // entry.shape[0], entry.offset
        for part, rows in parts.items():
            own = name.replace(whole, part)
            found[own] = replace(entry, name=own, shape=(rows, *entry.shape[1:]), offset=offset, nbytes=rows * row_bytes)
            offset += rows * row_bytes
    return found

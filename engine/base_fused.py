"""GGUF files with q, k and v of a layer in one tensor though the architecture has three (llama.cpp's converter, --fuse-qkv). No torch."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .models.facts import ModelFacts
from .weights.entry import TensorEntry


def split_qkv(facts: ModelFacts, tensors: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """`tensors` with each attn_qkv as the three tensors whose rows it holds, one under the other; nothing is read.

    Those of another number of rows stay as they are, to be refused as what the model does not use.
    """
    if facts.fused or not any(".attn_qkv." in name for name in tensors):
        return tensors
    parts = {"attn_q": facts.q_out, "attn_k": facts.kv_out, "attn_v": facts.kv_out}
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if ".attn_qkv." not in name or entry.shape[0] != sum(parts.values()):
            found[name] = entry
            continue
        row_bytes, offset = entry.nbytes // entry.shape[0], entry.offset
        for part, rows in parts.items():
            own = name.replace("attn_qkv", part)
            found[own] = replace(entry, name=own, shape=(rows, *entry.shape[1:]), offset=offset, nbytes=rows * row_bytes)
            offset += rows * row_bytes
    return found

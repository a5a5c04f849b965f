"""Attention of a decode step: norm and rotation of the heads, the write into the cache, and the products with all tokens, in one launch."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .rope import rope_


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Where the rows of a step stand. A row is the next token of one request; rows at position -1 are empty: nothing is read or written."""

    positions: Tensor
    """[rows] int32: tokens of the request before this one"""
    rope_rows: Tensor
    """[rows] int32: its row of the RoPE tables"""
    tables: Tensor
    """[rows, blocks of the longest request] int32: the blocks of each request in order"""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's attention is like."""

    heads: int
    kv_heads: int
    size: int
    scale: float
    """of the products of q and k"""
    softcap: float = 0.0
    """c of c tanh(score / c), 0 for none"""
    window: int = 0
    """tokens that one sees, itself included, 0 for all"""
    cos: Tensor | None = None
    """[positions, rotary] fp32 as `rope_table` makes them; None where nothing is turned"""
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    """[size] of every head by itself"""
    k_norm: Tensor | None = None
    eps: float = 0.0


def decode_attention_reference(qkv: Tensor, cache: Tensor, out: Tensor, rows: DecodeRows, heads: Heads) -> None:
    """Semantics, for every row t that is not empty: q, k normed and turned; cache[position] = k, v; out = softmax(cap(q K^T scale)) V over
    the tokens 0 .. position of its request (of them the last `window`).

    qkv [rows, (heads + 2 kv_heads) * size], may be changed; cache: a layer's [2, kv_heads, blocks, block_tokens, size]; out
    [rows, heads * size]. Sums and softmax in fp32. A row does not depend on the other rows.
    """
    block = cache.shape[3]
    for row in range(qkv.shape[0]):
        position = int(rows.positions[row])
        if position < 0:
            continue
        q, k, v = qkv[row].view(-1, heads.size).split((heads.heads, heads.kv_heads, heads.kv_heads))
        turned = torch.cat((_normed(q, heads.q_norm, heads.eps), _normed(k, heads.k_norm, heads.eps))).unsqueeze(0)
        if heads.cos is not None and heads.sin is not None:
            place = slice(int(rows.rope_rows[row]), int(rows.rope_rows[row]) + 1)
            rope_(turned[..., : heads.cos.shape[1]], heads.cos[place, None], heads.sin[place, None])
        q, k = turned[0].split((heads.heads, heads.kv_heads))
        here = int(rows.tables[row, position // block])
        cache[0, :, here, position % block] = k
        cache[1, :, here, position % block] = v
        first = max(0, position + 1 - heads.window) if heads.window else 0
        blocks = rows.tables[row, : position // block + 1].long()
        keys, values = cache[:, :, blocks].float().flatten(2, 3)[:, :, first : position + 1].unbind()
        group = heads.heads // heads.kv_heads
        scores = torch.einsum("kgd,ktd->kgt", q.float().view(heads.kv_heads, group, -1), keys) * heads.scale
        if heads.softcap:
            scores = heads.softcap * torch.tanh(scores / heads.softcap)
        out[row] = torch.einsum("kgt,ktd->kgd", scores.softmax(-1), values).reshape(-1)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x.clone() if weight is None else F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)

"""Attention over keys and values that lie in blocks.

A layer's cache is one tensor [blocks, block_tokens, 2 * kv_heads, d]: the keys' heads, then the values'. Both of a token
lie side by side, so storing a token is one copy and a run of consecutive blocks is one view.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one request in a step, and where its keys and values lie."""

    start: int
    """its first row in the step"""
    rows: int
    length: int
    """tokens in the cache, the rows of this step included; they are the last `rows` of them"""
    first_block: int
    """first block of a consecutive run; -1 when the blocks are scattered"""
    blocks: Tensor | None = None
    """[ceil(length / block_tokens)] int64 when scattered"""
    mask: Tensor | None = None
    """[rows, length] bool, True = may look; None for a single row, and for whole prompts (length == rows)"""


def causal_mask(rows: int, length: int, device: torch.device) -> Tensor | None:
    """The mask a Span needs: row i may look at the first length - rows + i + 1 tokens."""
    if rows == 1 or rows == length:
        return None
    return torch.ones(rows, length, dtype=torch.bool, device=device).tril_(length - rows)


def cache_write_(cache: Tensor, cells: Tensor, kv: Tensor) -> None:
    """Semantics: cache.flatten(0, 1)[cells[t]] = kv[t].  cells: [tokens] int64, kv: [tokens, 2 * kv_heads, d]."""
    cache.flatten(0, 1).index_copy_(0, cells, kv)


def paged_attention(q: Tensor, cache: Tensor, spans: Sequence[Span]) -> Tensor:
    """Semantics: softmax(q k^T / sqrt(d) under the causal mask) v, for every span by itself.

    q: [tokens, heads, d]; cache as above, this step's tokens already written. Returns [tokens, heads * d].
    KV heads are shared by views, never repeated in memory.
    """
    parts = [_attend(q[span.start : span.start + span.rows], _stored(cache, span), span) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _stored(cache: Tensor, span: Span) -> Tensor:
    """[length, 2 * kv_heads, d]: a view of a consecutive run, a gathered copy otherwise."""
    if span.blocks is not None:
        return cache[span.blocks].flatten(0, 1)[: span.length]
    first = span.first_block * cache.shape[1]
    return cache.flatten(0, 1)[first : first + span.length]


def _attend(q: Tensor, kv: Tensor, span: Span) -> Tensor:
    rows, heads, d = q.shape
    kv_heads = kv.shape[1] // 2
    group = heads // kv_heads
    k, v = kv.transpose(0, 1).split(kv_heads)
    if rows == 1:  # the query heads that share keys become the rows of one small product
        out = F.scaled_dot_product_attention(q.view(1, kv_heads, group, d), k[None], v[None])
        return out.reshape(1, heads * d)
    shared = (kv_heads, group, span.length, d)
    k, v = k[:, None].expand(shared), v[:, None].expand(shared)
    q = q.view(rows, kv_heads, group, d).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=span.mask, is_causal=span.mask is None)
    return out.permute(2, 0, 1, 3).reshape(rows, heads * d)

"""Attention over keys and values that lie in blocks.

A layer's cache is one tensor [blocks, block_tokens, 2 * kv_heads, d]: the keys' heads, then the values'. Both of a token
lie side by side, so storing a token is one copy and a run of consecutive blocks is one view.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """[rows, length - skip] bool, True = may look; None for a single row, and for whole prompts (length == rows)"""
    skip: int = 0
    """the first tokens, at which no row looks"""


@dataclass(frozen=True, slots=True)
class Scores:
    """What is done to the products of queries and keys before the softmax."""

    scale: float | None = None
    """None for 1 / sqrt(d)"""
    softcap: float = 0.0
    """c of c tanh(score / c), 0 for none"""


PLAIN = Scores()
CAPPED_SCORES = 1 << 24
"""products held at once where they are capped"""


def causal_mask(rows: int, length: int, device: torch.device) -> Tensor | None:
    """The mask a Span needs: row i may look at the first length - rows + i + 1 tokens."""
    if rows == 1 or rows == length:
        return None
    return torch.ones(rows, length, dtype=torch.bool, device=device).tril_(length - rows)


def windowed(span: Span, window: int, device: torch.device) -> Span:
    """`span` of a layer whose rows look at the last `window` tokens only, themselves included."""
    if span.length <= window:
        return span
    skip = max(0, span.length - span.rows + 1 - window)
    if span.rows == 1:
        return replace(span, skip=skip)
    before = span.length - span.rows - skip
    mask = torch.ones(span.rows, span.length - skip, dtype=torch.bool, device=device).tril_(before).triu_(before - window + 1)
    return replace(span, skip=skip, mask=mask)


def cache_write_(cache: Tensor, cells: Tensor, kv: Tensor) -> None:
    """Semantics: cache.flatten(0, 1)[cells[t]] = kv[t].  cells: [tokens] int64, kv: [tokens, 2 * kv_heads, d]."""
    cache.flatten(0, 1).index_copy_(0, cells, kv)


def paged_attention(q: Tensor, cache: Tensor, spans: Sequence[Span], scores: Scores = PLAIN) -> Tensor:
    """Semantics: softmax(cap(q k^T scale) under the span's mask) v, for every span by itself.

    q: [tokens, heads, d]; cache as above, this step's tokens already written. Returns [tokens, heads * d].
    KV heads are shared by views, never repeated in memory. What is not finite in q is not in the result either.
    """
    attend = _attend if scores.softcap == 0 else _attend_capped
    parts = [attend(q[span.start : span.start + span.rows], _stored(cache, span), span, scores) for span in spans]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    # torch's kernel for CPUs takes rows whose scores are all NaN for masked ones and returns zeros; 0 * q adds nothing but NaN
    return out.add_(q.flatten(1), alpha=0) if q.device.type == "cpu" else out


def _stored(cache: Tensor, span: Span) -> Tensor:
    """[length - skip, 2 * kv_heads, d]: a view of a consecutive run, a gathered copy otherwise."""
    if span.blocks is not None:
        block = cache.shape[1]
        skipped = span.skip // block
        return cache[span.blocks[skipped:]].flatten(0, 1)[span.skip - skipped * block : span.length - skipped * block]
    first = span.first_block * cache.shape[1]
    return cache.flatten(0, 1)[first + span.skip : first + span.length]


def _attend(q: Tensor, kv: Tensor, span: Span, scores: Scores) -> Tensor:
    rows, heads, d = q.shape
    kv_heads = kv.shape[1] // 2
    group = heads // kv_heads
    k, v = kv.transpose(0, 1).split(kv_heads)
    if rows == 1:  # the query heads that share keys become the rows of one small product
        out = F.scaled_dot_product_attention(q.view(1, kv_heads, group, d), k[None], v[None], scale=scores.scale)
        return out.reshape(1, heads * d)
    shared = (kv_heads, group, kv.shape[0], d)
    k, v = k[:, None].expand(shared), v[:, None].expand(shared)
    q = q.view(rows, kv_heads, group, d).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=span.mask, is_causal=span.mask is None, scale=scores.scale)
    return out.permute(2, 0, 1, 3).reshape(rows, heads * d)


def _attend_capped(q: Tensor, kv: Tensor, span: Span, scores: Scores) -> Tensor:
    """As `_attend`, step by step: the fused operation has no place for the cap. Takes the memory of CAPPED_SCORES at once."""
    rows, heads, d = q.shape
    mask = span.mask
    if mask is None and rows > 1:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril_()
    step = max(1, CAPPED_SCORES // (heads * kv.shape[0]))
    chunks = [slice(first, first + step) for first in range(0, rows, step)]
    parts = [_capped_rows(q[chunk], kv, None if mask is None else mask[chunk], scores) for chunk in chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _capped_rows(q: Tensor, kv: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """The softmax is taken in fp32."""
    rows, heads, d = q.shape
    kv_heads = kv.shape[1] // 2
    k, v = kv.transpose(0, 1).split(kv_heads)
    q = q.reshape(rows, kv_heads, heads // kv_heads, d).transpose(0, 1).flatten(1, 2)
    products = (q @ k.transpose(1, 2)).mul_(d**-0.5 if scores.scale is None else scores.scale)
    products = products.div_(scores.softcap).tanh_().mul_(scores.softcap).view(kv_heads, rows, -1, kv.shape[0])
    if mask is not None:
        products = products.masked_fill_(~mask[:, None], float("-inf"))
    weights = products.flatten(1, 2).softmax(-1, dtype=torch.float32).to(v.dtype)
    return (weights @ v).view(kv_heads, rows, -1, d).transpose(0, 1).reshape(rows, heads * d)

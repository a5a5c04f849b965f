"""Attention over keys and values that lie in blocks.

The cache of all layers is one tensor [layers, 2, kv_heads, blocks, block_tokens, d]: a layer's keys, then its values. Head by head, a run
of consecutive blocks is one view whose tokens lie end to end, which is how the products read them; a block is copied in one operation.
Blocks in several runs are first laid end to end, by one copy a layer. Joining a softmax over the runs costs about as much on CPUs, and it
rounds otherwise: so the numbers are those of a single run, bit for bit, and where blocks happen to lie never changes a reply.
On GPUs our own kernel follows the blocks (prefill_attention.py); torch's are used there without Triton, and for wider heads than it takes.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .prefill_attention import Pieces, cut_pieces, prefill_attention, takes_pieces
from .spans import PLAIN, Scores, Span


@dataclass(frozen=True, slots=True)
class Reach:
    """What the rows of a span look at, the same in all layers of one window."""

    start: int
    rows: int
    first: int
    """the first token looked at: its cell in a layer's cache, or its place in what `blocks` gathers"""
    tokens: int
    blocks: Tensor | None
    """[2 * kv_heads * blocks] int64 rows of a layer's cache as [2 * kv_heads * blocks, block_tokens * d]; None where they are one run"""
    mask: Tensor | None
    """[rows, tokens] in the cache's dtype, 0 or -inf, added to the scores; None where all is seen, and where a row sees all up to itself"""


CAPPED_SCORES = 1 << 24
"""products held at once where they are capped"""
MASK_STRIDE = 16
"""the fused kernels of CUDA copy a mask in every layer unless its rows begin at multiples of so many numbers"""


def reaches(
    spans: Sequence[Span], caches: Tensor, heads: int, window: int = 0, scores: Scores = PLAIN,
) -> tuple[Reach, ...] | Pieces:
    """What `spans` look at with `heads` query heads, in layers whose rows see the last `window` tokens only, themselves included (0: all).

    Once a step. Pieces where a kernel of ours takes all spans at once (`takes_pieces`).
    """
    if takes_pieces(caches):
        return cut_pieces(spans, caches, heads, window)
    return tuple(_reach(span, caches, window, scores) for span in spans)


def _reach(span: Span, caches: Tensor, window: int, scores: Scores) -> Reach:
    block = caches.shape[4]
    bounded = 0 < window < span.length
    skip = max(0, span.length - span.rows + 1 - window) if bounded else 0
    passed, first = divmod(skip, block)
    runs, blocks = _without(span.runs, passed), None
    if len(runs) == 1:
        first += runs[0][0] * block
    else:
        blocks = _cache_rows(runs, caches)
    whole = span.rows == span.length and not bounded and scores.softcap == 0
    mask = None if span.rows == 1 or whole else _mask(span.rows, span.length - skip, window if bounded else 0, caches)
    return Reach(span.start, span.rows, first, span.length - skip, blocks, mask)


def _without(runs: Sequence[tuple[int, int]], passed: int) -> list[tuple[int, int]]:
    """`runs` without their first `passed` blocks."""
    left = []
    for first, count in runs:
        if count > passed:
            left.append((first + passed, count - passed))
        passed = max(0, passed - count)
    return left


def _cache_rows(runs: Sequence[tuple[int, int]], caches: Tensor) -> Tensor:
    blocks = torch.tensor([block for first, count in runs for block in range(first, first + count)])
    heads = torch.arange(2 * caches.shape[2])[:, None] * caches.shape[3]
    return (heads + blocks).flatten().to(caches.device)


def _mask(rows: int, tokens: int, window: int, caches: Tensor) -> Tensor:
    """Row i sees the tokens up to tokens - rows + i, of them the last `window` (0: all)."""
    width = -(-tokens // MASK_STRIDE) * MASK_STRIDE
    seen = torch.ones(rows, width, dtype=torch.bool, device=caches.device).tril_(tokens - rows)
    if window:
        seen.triu_(tokens - rows - window + 1)
    return torch.zeros(rows, width, dtype=caches.dtype, device=caches.device).masked_fill_(~seen, float("-inf"))[:, :tokens]


def cache_write_(cache: Tensor, cells: Tensor, kv: Tensor) -> None:
    """Semantics: cache.flatten(0, 1).flatten(1, 2)[:, cells[t]] = kv[t].

    cache: a layer's [2, kv_heads, blocks, block_tokens, d]; cells: [tokens] int64; kv: [tokens, 2 * kv_heads, d], the keys' heads first.
    """
    cache.view(kv.shape[1], -1, kv.shape[2]).index_copy_(1, cells, kv.transpose(0, 1))


def copy_block_(caches: Tensor, source: int, target: int, cells: int) -> None:
    """Copy the keys and values of the first `cells` tokens of block `source` into block `target`, of all layers at once."""
    caches[:, :, :, target, :cells] = caches[:, :, :, source, :cells]


def paged_attention(q: Tensor, cache: Tensor, reaches: Sequence[Reach] | Pieces, scores: Scores = PLAIN) -> Tensor:
    """Semantics: softmax(cap(q k^T scale) + mask) v, for every span by itself.

    q: [tokens, heads, d]; cache: a layer's [2, kv_heads, blocks, block_tokens, d], this step's tokens already written; `reaches` made
    with the same scores. Returns [tokens, heads * d]. KV heads are shared by views, never repeated in memory. Where q is not finite,
    neither is the result.
    """
    if isinstance(reaches, Pieces):
        return prefill_attention(q, cache, reaches, scores)
    attend = _attend if scores.softcap == 0 else _attend_capped
    parts = [attend(q[reach.start : reach.start + reach.rows], *_stored(cache, reach), reach.mask, scores) for reach in reaches]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    # torch's kernel for CPUs takes rows whose scores are all NaN for masked ones and returns zeros; 0 * q adds nothing but NaN
    return out.add_(q.flatten(1), alpha=0) if q.device.type == "cpu" else out


def _stored(cache: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    """Keys and values, each [1, kv_heads, tokens, d]: views of a single run, of a gathered copy otherwise."""
    _, kv_heads, _, block, d = cache.shape
    kv = cache if reach.blocks is None else cache.view(-1, block * d).index_select(0, reach.blocks)
    k, v = kv.view(2, 1, kv_heads, -1, d).narrow(3, reach.first, reach.tokens).unbind(0)
    return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    rows, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if rows == 1:  # the query heads that share keys become the rows of one small product
        return F.scaled_dot_product_attention(q.view(1, kv_heads, group, d), k, v, scale=scores.scale).reshape(1, heads * d)
    # The heads that share keys are the batch: torch's fused kernel for fp32 on CUDA takes heads of stride 0 for a decode where one row is
    # left for its last tile (of 65, 129, ... rows), and reads the mask of other rows then
    shared = (group, kv_heads, k.shape[2], d)
    q = q.view(rows, kv_heads, group, d).permute(2, 1, 0, 3)
    out = F.scaled_dot_product_attention(q, k.expand(shared), v.expand(shared), attn_mask=mask, is_causal=mask is None, scale=scores.scale)
    return out.permute(2, 1, 0, 3).reshape(rows, heads * d)


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """As `_attend`, step by step: the fused operation has no place for the cap. Takes the memory of CAPPED_SCORES at once."""
    rows, heads, _ = q.shape
    step = max(1, CAPPED_SCORES // (heads * k.shape[2]))
    chunks = [slice(first, first + step) for first in range(0, rows, step)]
    parts = [_capped_rows(q[chunk], k[0], v[0], None if mask is None else mask[chunk], scores) for chunk in chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _capped_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """k, v: [kv_heads, tokens, d]. The softmax is taken in fp32."""
    rows, heads, d = q.shape
    kv_heads, tokens, _ = k.shape
    q = q.reshape(rows, kv_heads, heads // kv_heads, d).transpose(0, 1).flatten(1, 2)
    products = (q @ k.transpose(1, 2)).mul_(d**-0.5 if scores.scale is None else scores.scale)
    products = products.div_(scores.softcap).tanh_().mul_(scores.softcap).view(kv_heads, rows, -1, tokens)
    if mask is not None:
        products += mask[:, None]
    weights = products.flatten(1, 2).softmax(-1, dtype=torch.float32).to(v.dtype)
    return (weights @ v).view(kv_heads, rows, -1, d).transpose(0, 1).reshape(rows, heads * d)

"""The heads of a step of many rows between their linear and attention: what rank rows add, norms, rotation, the write into the cache."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from dataclasses import dataclass

from torch import Tensor

from .attention import cache_write_
from .decode_attention import power_of_two
from .launch import launch
from .lora_tiles import PLAIN_ROWS, TILE_ROWS, Shrunk, lora_expand_tiles_
from .norm import rms_norm
from .rank_programs import row_sums
from .rope import rope_
from .triton_compat import runs_triton, tl, triton


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of q and k heads."""

    cos: Tensor
    """[tokens, 1, d] fp32 rows of `rope_table`: whole heads turn"""
    sin: Tensor
    q_norm: Tensor | None
    """[d], the weight of the norm of every q head by itself; None for none of q and k"""
    k_norm: Tensor | None
    eps: float


def head_tiles(qkv: Tensor, heads: int, turn: Turn, cache: Tensor, cells: Tensor, shrunk: Shrunk | None = None) -> Tensor:
    """Semantics: q, k, v = qkv + H B^T; q, k = rope(norm(q)), rope(norm(k)); cache_write_(k, v). Returns q [tokens, heads, d].

    qkv [tokens, heads + 2 * kv_heads, d], whose memory q takes; cache and cells as those of `cache_write_`; `shrunk`: of the linear, of
    three slices. In fp32 on a GPU up to what is stored; a row on which nothing acts has the bits that it has without `shrunk`.
    """
    tokens, size = qkv.shape[0], qkv.shape[2]
    if not runs_triton(qkv):
        return _reference(qkv, heads, turn, cache, cells, shrunk)
    kv_heads, ranked = cache.shape[1], shrunk is not None and shrunk.places.most > 0
    if ranked:
        shrunk.wait()
    rows = TILE_ROWS if ranked else PLAIN_ROWS
    half = max(16, power_of_two(size // 2))
    launch(
        _head_kernel, (qkv.get_device(), qkv.dtype, qkv.data_ptr() % 16, qkv.stride(0), turn.q_norm is None or turn.q_norm.dtype),
        (heads + 2 * kv_heads, -(-tokens // rows), 1),
        (qkv, cache, cells, turn.cos, turn.sin, turn.q_norm, turn.k_norm,
         *(shrunk.of_kernels if ranked else (qkv, qkv, qkv, qkv, qkv, 0, 0, 0, 0, 0)), tokens, qkv.stride(0), cache.stride(1), turn.eps),
        {"HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size, "HALF": half, "LEVELS": half.bit_length() - 1, "RANKED": ranked, "BM": rows},
        num_warps=4)
    return qkv[:, :heads]


def _reference(qkv: Tensor, heads: int, turn: Turn, cache: Tensor, cells: Tensor, shrunk: Shrunk | None) -> Tensor:
    kv_heads = cache.shape[1]
    if shrunk is not None:
        lora_expand_tiles_(qkv.flatten(1), shrunk)
    if turn.q_norm is not None:
        for part, weight in ((qkv[:, :heads], turn.q_norm), (qkv[:, heads:-kv_heads], turn.k_norm)):
            part.copy_(rms_norm(part, weight, turn.eps))
    rope_(qkv[:, :-kv_heads], turn.cos, turn.sin)
    cache_write_(cache, cells, qkv[:, heads:])
    return qkv[:, :heads]


@triton.jit(do_not_specialize=["tokens", "layer", "most"], do_not_specialize_on_alignment=["counts", "pages", "touched", "cells"])
def _head_kernel(
    qkv, cache, cells, cos, sin, q_norm, k_norm, b, counts, pages, touched, h, layer, b_page, b_layer, h_row, most,
    tokens, row, cache_head, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr,
    RANKED: tl.constexpr, BM: tl.constexpr,
):
    """A program takes one head of BM rows, its halves apart: dimension i turns with dimension i + SIZE / 2."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    s = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
    m = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, HALF)
    here = m < tokens
    inside = d < SIZE // 2
    both = here[:, None] & inside[None, :]
    at = qkv + m.to(tl.int64)[:, None] * row + head * SIZE + d[None, :]
    low = tl.load(at, mask=both, other=0.0)
    high = tl.load(at + SIZE // 2, mask=both, other=0.0)
    if RANKED:
        count = tl.load(counts + tile)
        acts = (tl.load(touched + m, mask=here, other=0) != 0)[:, None]
        r = tl.arange(0, 16)
        hs = h + m.to(tl.int64)[:, None] * h_row + (s * 16 + r)[None, :]
        bs = b + layer * b_layer + (head * SIZE + d)[None, :] * 16 + r[:, None]
        added = tl.zeros((BM, HALF), tl.float32)
        added_high = added
        for place in range(0, count):
            page = tl.load(pages + tile * most + place).to(tl.int64) * b_page
            hk = tl.load(hs + place * 48, mask=acts, other=0.0)
            b_low = tl.load(bs + page, mask=inside[None, :], other=0.0)
            b_high = tl.load(bs + (page + SIZE // 2 * 16), mask=inside[None, :], other=0.0)
            added = tl.dot(hk, b_low, added, input_precision="ieee")
            added_high = tl.dot(hk, b_high, added_high, input_precision="ieee")
        low = low.to(tl.float32) + added
        high = high.to(tl.float32) + added_high
    else:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
    dtype = qkv.dtype.element_ty
    if s < 2:
        if q_norm is not None:
            rstd = tl.rsqrt(row_sums(tl.fma(low, low, high * high), HALF, LEVELS) / SIZE + eps)[:, None]
            low = (low * rstd * _weight(q_norm, k_norm, s, d, inside)[None, :]).to(dtype).to(tl.float32)
            high = (high * rstd * _weight(q_norm, k_norm, s, SIZE // 2 + d, inside)[None, :]).to(dtype).to(tl.float32)
        angle = m.to(tl.int64)[:, None] * SIZE + d[None, :]
        c = tl.load(cos + angle, mask=both, other=0.0)
        t = tl.load(sin + SIZE // 2 + angle, mask=both, other=0.0)
        turned = tl.fma(low, c, -(high * t))
        high = tl.fma(high, c, low * t)
        low = turned
    if s > 0:
        cell = tl.load(cells + m, mask=here, other=0)
        at = cache + (head - HEADS).to(tl.int64) * cache_head + cell[:, None] * SIZE + d[None, :]
    tl.store(at, low.to(dtype), mask=both)
    tl.store(at + SIZE // 2, high.to(dtype), mask=both)


@triton.jit
def _weight(q_norm, k_norm, s, place, inside):
    weight = tl.where(s == 0, tl.load(q_norm + place, mask=inside, other=0.0), tl.load(k_norm + place, mask=inside, other=0.0))
    return weight.to(tl.float32)

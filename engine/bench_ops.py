"""The ops that `bench_kernels` measures: one entry of OPS each."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import paged_attention, reaches
from ..kernels.decode_attention import AttentionWork, DecodeRows, Heads, decode_attention
from ..kernels.decode_linear import DecodeWork, Residual, RowSquares, decode_linear, square_parts
from ..kernels.device_sampling import DRAW_WORDS, DeviceSampler
from ..kernels.lora_tiles import SideStream, cut_tiles, lora_expand_tiles_, lora_shrink_tiles
from ..kernels.packed_linear import packed_square_parts
from ..kernels.quant import QUANT_TYPES
from ..kernels.rank_pages import MAX_PAGES, PAGE_ROWS, RankPool, RankRows
from ..kernels.repacked import RepackedWeight, repacked
from ..kernels.rope import inverse_frequencies, rope_table
from ..kernels.sampling import Draw
from ..kernels.spans import Span
from ..kernels.triton_compat import runs_triton
from .blocks import BLOCK_TOKENS, blocks_for
from .models.facts import ModelFacts
from .page_image import PageShape, page_shapes, pages_for
from .peer_cell import SCALE, PeerCell
from .random_base import random_packed

COPY_BYTES = {"cpu": 1 << 24, "cuda": 400 << 20}
"""of all that an op reads, in copies that it takes in turn, so that no cache holds them"""
PACKED_TYPES = "Q4_K", "Q8_0"
MOST_COPIES = {"cpu": 2, "cuda": 64}


@dataclass(frozen=True, slots=True)
class Setting:
    """What the ops are measured at."""

    facts: ModelFacts
    device: torch.device
    dtype: torch.dtype
    rows: int
    """of a decode step"""
    context: int
    """tokens of each"""
    tokens: int
    """of a prompt"""
    ranks: Sequence[int]
    """of the adapters that act, at most one for each row; the rows are parted among them"""

    def random(self, *shape: int, size: float = 1.0) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device).normal_(0.0, size)

    def copies(self, nbytes: int) -> int:
        return max(1, min(MOST_COPIES[self.device.type], -(-COPY_BYTES[self.device.type] // nbytes)))


@dataclass(frozen=True, slots=True)
class Case:
    """An op with all that it works on."""

    name: str
    run: Callable[[], object]
    """takes each copy once"""
    copies: int
    nbytes: int
    """that one of them cannot but read"""
    plain: Callable[[], object] | None = None
    """what torch has for it, without adapters: the product alone, or attention over keys and values end to end"""
    peer_cell: PeerCell | None = None
    """what other engines have ops for"""


def linears(at: Setting) -> Iterator[Case]:
    """decode_linear of every kind with what stands around it, without adapters and with."""
    for kind, shape in page_shapes(at.facts).items():
        yield from _linear(at, kind, shape, "")


def packed_linears(at: Setting) -> Iterator[Case]:
    """The same of matrices that are packed as in GGUF files, where kernels take them."""
    if at.dtype.itemsize != 2 or not runs_triton(at.random(1)):
        return
    for type_name in PACKED_TYPES:
        for kind, shape in page_shapes(at.facts).items():
            if shape.d_in % QUANT_TYPES[type_name].block_elements == 0:
                yield from _linear(at, kind, shape, type_name)


def _packed(at: Setting, kind: str, shape: PageShape, type_name: str) -> RepackedWeight:
    weight = repacked(random_packed((shape.ends[-1], shape.d_in), type_name, at.device, at.dtype), gated=kind == "gate_up_proj")
    assert weight is not None  # of 16 bits and a type that has an order
    return weight


def _linear(at: Setting, kind: str, shape: PageShape, type_name: str) -> Iterator[Case]:
    d_in, d_out = shape.d_in, shape.ends[-1]
    first = _packed(at, kind, shape, type_name) if type_name else at.random(d_out, d_in, size=d_in ** -0.5)
    nbytes, name = first.nbytes, f"{kind}, {type_name}" if type_name else kind
    copies = at.copies(nbytes)
    weights = [first, *(deepcopy(first) for _ in range(copies - 1))]
    x, glu = at.random(at.rows, d_in), "silu" if kind == "gate_up_proj" else ""
    work = DecodeWork(at.rows, [(d_in, d_out, len(shape.ends))] * copies, at.dtype, at.device, weights if type_name else ())
    out = torch.full((at.rows, d_out // 2 if glu else d_out), float("nan"), dtype=at.dtype, device=at.device)
    norm = residual = None
    hidden = at.facts.hidden
    parts = max(square_parts(before, hidden, at.dtype) for before in (at.facts.q_out, at.facts.intermediate))
    if type_name and kind in ("o_proj", "down_proj"):
        parts = packed_square_parts(first)
    squares = RowSquares(torch.rand(parts, at.rows, device=at.device) * 2 * hidden / parts, hidden, at.facts.rms_eps)
    if kind in ("o_proj", "down_proj"):
        residual = Residual(at.random(at.rows, hidden), at.random(hidden), squares)
    else:
        norm = squares

    def run(ranks: Sequence[RankRows | None]) -> None:
        work.begin()
        for index, (weight, rank) in enumerate(zip(weights, ranks, strict=True)):
            decode_linear(x, weight, None, out, norm=norm, glu=glu, residual=residual, rank=rank, work=work.lane(index))

    plain = None if type_name else lambda: [F.linear(x, weight) for weight in weights]
    yield Case(name, partial(run, [None] * copies), copies, nbytes, plain)
    if at.ranks and kind != "lm_head":
        pool, pages, columns = _pool(at, shape, copies)
        numbers = torch.zeros(1 + 2 * MAX_PAGES, dtype=torch.int32)
        numbers[0] = len(pages)
        numbers[1:1 + len(pages)], numbers[1 + MAX_PAGES:1 + MAX_PAGES + len(pages)] = torch.tensor(pages), torch.tensor(columns)
        acting = torch.from_numpy(_acting(at, at.rows)).to(at.device)
        ranks = [RankRows(pool, copy, numbers.to(at.device), acting) for copy in range(copies)]
        more = sum(at.ranks) * (len(shape.ends) * d_in + d_out) * at.dtype.itemsize
        cell = None if type_name else PeerCell(d_in, shape.ends, at.ranks, _of_row(at, at.rows), False, weights, x)
        yield Case(f"{name}, {_adapters(at)}", partial(run, ranks), copies, nbytes + more, peer_cell=cell)


def _pool(at: Setting, shape: PageShape, copies: int) -> tuple[RankPool, list[int], list[int]]:
    """Pages of all adapters, a copy for each layer; their numbers, and the column of each."""
    columns = [column for column, rank in enumerate(at.ranks) for _ in range(pages_for(rank))]
    count = len(columns)
    pool = RankPool(at.random(count, copies, len(shape.ends), PAGE_ROWS, shape.d_in, size=shape.d_in ** -0.5),
                    at.random(count, copies, shape.ends[-1], PAGE_ROWS, size=0.02), shape.ends)
    return pool, torch.randperm(count).tolist(), columns


def _acting(at: Setting, rows: int) -> np.ndarray:
    weights = np.zeros((rows, len(at.ranks)), np.float32)
    weights[np.arange(rows), _of_row(at, rows)] = SCALE
    return weights


def _of_row(at: Setting, rows: int) -> list[int]:
    """Which adapter each row has."""
    return [row * len(at.ranks) // rows for row in range(rows)]


def _adapters(at: Setting) -> str:
    return "1 adapter" if len(at.ranks) == 1 else f"{len(at.ranks)} adapters"


def reply_attention(at: Setting) -> Iterator[Case]:
    """decode_attention of rows whose blocks lie anywhere."""
    facts, blocks = at.facts, blocks_for(at.context)
    nbytes = 2 * at.rows * facts.kv_out * at.context * at.dtype.itemsize
    copies = at.copies(nbytes)
    caches = at.random(copies, 2, facts.kv_heads, at.rows * blocks, BLOCK_TOKENS, facts.head_dim)
    last = torch.full((at.rows,), at.context - 1, dtype=torch.int32, device=at.device)
    rows = DecodeRows(last, last, torch.randperm(at.rows * blocks, device=at.device).int().view(at.rows, blocks))
    cos, sin = rope_table(inverse_frequencies(facts.rotary, facts.rope_theta), at.context, torch.float32, at.device)
    heads = Heads(facts.heads, facts.kv_heads, facts.head_dim, facts.head_dim ** -0.5, cos=cos, sin=sin)
    work, out = AttentionWork(at.rows, heads, at.device), at.random(at.rows, facts.q_out)
    qkv = at.random(at.rows, facts.q_out + 2 * facts.kv_out)
    end_to_end = at.random(copies, 2, at.rows, facts.kv_heads, at.context, facts.head_dim)
    q = at.random(at.rows, facts.heads, 1, facts.head_dim)
    yield Case("attention of replies", lambda: [decode_attention(qkv, cache, out, rows, heads, work) for cache in caches], copies, nbytes,
               lambda: [F.scaled_dot_product_attention(q, keys, values, enable_gqa=True) for keys, values in end_to_end])


def prompt_attention(at: Setting) -> Iterator[Case]:
    """The attention of one prompt over itself."""
    facts, blocks = at.facts, blocks_for(at.tokens)
    nbytes = (2 * facts.kv_out + facts.q_out) * at.tokens * at.dtype.itemsize
    copies = min(4, at.copies(nbytes))
    caches = at.random(copies, 2, facts.kv_heads, blocks, BLOCK_TOKENS, facts.head_dim)
    span = Span(0, at.tokens, at.tokens, tuple((block, 1) for block in torch.randperm(blocks).tolist()))
    seen = reaches([span], caches, facts.heads)
    q = at.random(at.tokens, facts.heads, facts.head_dim)
    turned = q.transpose(0, 1)[None].contiguous()
    end_to_end = at.random(copies, 2, 1, facts.kv_heads, at.tokens, facts.head_dim)
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    yield Case("attention of a prompt", lambda: [paged_attention(q, cache, seen) for cache in caches], copies, nbytes,
               lambda: [attend(turned, keys, values) for keys, values in end_to_end])


def prompt_linears(at: Setting) -> Iterator[Case]:
    """The linears of prompts under all adapters: torch's product with the low-rank part beside it and behind it."""
    if not at.ranks or at.tokens < len(at.ranks):
        return
    side = SideStream(at.device) if at.device.type == "cuda" else None
    for kind, shape in page_shapes(at.facts).items():
        if kind != "lm_head":
            yield _prompt_linear(at, kind, shape, side)


def _prompt_linear(at: Setting, kind: str, shape: PageShape, side: SideStream | None) -> Case:
    d_in, d_out = shape.d_in, shape.ends[-1]
    nbytes = (d_in * d_out + sum(at.ranks) * (len(shape.ends) * d_in + d_out)) * at.dtype.itemsize
    copies = min(4, at.copies(nbytes))
    weights, x = [at.random(d_out, d_in, size=d_in ** -0.5) for _ in range(copies)], at.random(at.tokens, d_in)
    pool, pages, columns = _pool(at, shape, copies)
    tiles = cut_tiles(_acting(at, at.tokens), [(tuple(pages), tuple(columns))], at.device)

    def run() -> None:
        for copy, weight in enumerate(weights):
            shrunk = lora_shrink_tiles(x, pool, copy, tiles, 0, side)
            y = F.linear(x, weight)
            lora_expand_tiles_(y, shrunk)

    return Case(f"{kind} of prompts, {_adapters(at)}", run, copies, nbytes, lambda: [F.linear(x, weight) for weight in weights],
                PeerCell(d_in, shape.ends, at.ranks, _of_row(at, at.tokens), True, weights, x))


def draws(at: Setting) -> Iterator[Case]:
    """The next tokens out of logits: the best ones, and at random."""
    nbytes = at.rows * at.facts.vocab * at.dtype.itemsize
    copies = at.copies(nbytes)
    logits, tokens = at.random(copies, at.rows, at.facts.vocab), torch.zeros(at.rows, dtype=torch.int64, device=at.device)
    for name, draw in (("the best token", Draw()), ("a token at random", Draw(temperature=0.8, top_p=0.9, vocab=at.facts.vocab))):
        host = np.zeros((at.rows, DRAW_WORDS), np.int64)
        device = torch.zeros(at.rows, DRAW_WORDS, dtype=torch.int64, device=at.device)
        sampler = DeviceSampler(host, device, at.facts.vocab)
        sampler.set([draw] * at.rows)
        device.copy_(torch.from_numpy(host))
        yield Case(name, partial(_draw_all, sampler, logits, tokens), copies, nbytes,
                   (lambda: [one.argmax(-1) for one in logits]) if draw.temperature == 0 else None)


def _draw_all(sampler: DeviceSampler, logits: Tensor, tokens: Tensor) -> None:
    for one in logits:
        sampler.run(one, tokens)


OPS: tuple[Callable[[Setting], Iterator[Case]], ...] = linears, packed_linears, reply_attention, prompt_attention, prompt_linears, draws

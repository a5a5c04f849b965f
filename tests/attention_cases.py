"""Random decode steps over a paged cache, and what their attention is by fp64 arithmetic of its own."""
from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_bench.kernels.decode_attention import DecodeRows, Heads
from lora_bench.kernels.rope import inverse_frequencies, rope_table

BLOCK = 16
NAN = float("nan")
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""relative, by the dtype that the weights of tokens are rounded to"""


@dataclass
class DecodeCase:
    """A layer's part of a step. What no row may read is NaN, what tables do not hold a block that is not there."""

    qkv: Tensor
    cache: Tensor
    rows: DecodeRows
    heads: Heads
    past: list[Tensor]
    """of each row [2, kv_heads, position, size] fp64: keys and values of the tokens before it"""

    def run(self, op, *rest: object) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        """(out, cache after it) of `op`, over copies; `out` was full of NaN."""
        out = torch.full((len(self.qkv), self.heads.heads * self.heads.size), NAN, dtype=self.qkv.dtype, device=self.qkv.device)
        cache = self.cache.clone()
        op(self.qkv.clone(), cache, out, self.rows, self.heads, *rest)
        return out, cache

    def to(self, device: str) -> DecodeCase:
        rows = DecodeRows(*(tensor.to(device) for tensor in (self.rows.positions, self.rows.rope_rows, self.rows.tables)))
        names = ("cos", "sin", "q_norm", "k_norm")
        moved = {name: tensor.to(device) for name in names if (tensor := getattr(self.heads, name)) is not None}
        return DecodeCase(self.qkv.to(device), self.cache.to(device), rows, replace(self.heads, **moved), self.past)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """fp64: out [rows, heads * size], keys and values [rows, kv_heads, size] that the cache gets; NaN for empty rows."""
        h = self.heads
        outs = torch.full((len(self.qkv), h.heads, h.size), NAN, dtype=torch.float64)
        keys, values = (torch.full((len(self.qkv), h.kv_heads, h.size), NAN, dtype=torch.float64) for _ in range(2))
        for row, position in enumerate(self.rows.positions.tolist()):
            if position < 0:
                continue
            heads = self.qkv[row].cpu().double().view(-1, h.size)
            q = self._turned(heads[: h.heads], h.q_norm, row)
            k, v = self._turned(heads[h.heads : h.heads + h.kv_heads], h.k_norm, row), heads[h.heads + h.kv_heads :]
            keys[row], values[row] = k, v
            first = max(0, position + 1 - h.window) if h.window else 0
            for head in range(h.heads):
                shared = head // (h.heads // h.kv_heads)
                seen_k = torch.cat((self.past[row][0, shared], k[shared, None]))[first:]
                seen_v = torch.cat((self.past[row][1, shared], v[shared, None]))[first:]
                scores = seen_k @ q[head] * h.scale
                scores = h.softcap * (scores / h.softcap).tanh() if h.softcap else scores
                outs[row, head] = scores.softmax(0) @ seen_v
        return outs.flatten(1), keys, values

    def _turned(self, x: Tensor, weight: Tensor | None, row: int) -> Tensor:
        if weight is not None:
            x = x / (x.square().mean(1, keepdim=True) + self.heads.eps).sqrt() * weight.cpu().double()
        if self.heads.cos is None:
            return x
        place, half = int(self.rows.rope_rows[row]), self.heads.cos.shape[1] // 2
        cos, sin = self.heads.cos[place, :half].cpu().double(), self.heads.sin[place, half:].cpu().double()
        a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), 1)


def decode_case(
    rng: random.Random, positions: list[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float32, rotary: int = -1,
    normed: bool = False, softcap: float = 0.0, window: int = 0, width: int = 0, rope_start: int = 0,
    scale: float = 0.0,
) -> DecodeCase:
    """Rows at `positions`, -1 for none; `rotary` -1 for all of the head; `width`: blocks of the tables beyond the longest row's."""
    rotary = size if rotary < 0 else rotary
    longest = max(positions)
    blocks = sum(position // BLOCK + 1 for position in positions) + 5
    free = rng.sample(range(blocks), blocks)
    tables = torch.full((len(positions), longest // BLOCK + 1 + width), 1 << 30, dtype=torch.int32)
    cache = torch.full((2, kv_heads, blocks, BLOCK, size), NAN, dtype=dtype)
    past = []
    for row, position in enumerate(positions):
        kept = torch.randn(2, kv_heads, max(0, position), size).to(dtype)
        past.append(kept.double())
        held = [free.pop() for _ in range(position // BLOCK + 1)] if position >= 0 else []
        tables[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
        for place, block in enumerate(held):
            part = kept[:, :, place * BLOCK : (place + 1) * BLOCK]
            cache[:, :, block, : part.shape[2]] = part
    cos = sin = None
    if rotary:
        cos, sin = rope_table(inverse_frequencies(rotary, 1e4), rope_start + longest + 1, torch.float32, torch.device("cpu"), 1.1)
    weights = [(1 + 0.3 * torch.randn(size)).to(dtype) if normed else None for _ in range(2)]
    kind = Heads(heads, kv_heads, size, scale or rng.uniform(0.5, 2) / math.sqrt(size), softcap, window, cos, sin, *weights, 1e-5)
    places = torch.tensor(positions, dtype=torch.int32)
    return DecodeCase(torch.randn(len(positions), (heads + 2 * kv_heads) * size).to(dtype), cache,
                      DecodeRows(places, (places.clamp(min=0) + rope_start).int(), tables), kind, past)


def check_decode(case: DecodeCase, out: Tensor, cache: Tensor) -> float:
    """Assert that `out` and the cache are what they must be, and nothing else was written. Returns the largest relative error of a row."""
    dtype = case.qkv.dtype
    expected, keys, values = case.expected()
    out, cache = out.cpu(), cache.cpu()
    worst = 0.0
    before = case.cache.cpu().clone()
    for row, position in enumerate(case.rows.positions.tolist()):
        if position < 0:
            assert out[row].isnan().all()
            continue
        worst = max(worst, float((out[row].double() - expected[row]).norm() / expected[row].norm()))
        block = int(case.rows.tables[row, position // BLOCK])
        written = cache[:, :, block, position % BLOCK]
        assert torch.equal(written[1].double(), values[row])
        torch.testing.assert_close(written[0].double(), keys[row], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        before[:, :, block, position % BLOCK] = written
    assert torch.equal(before.view(torch.uint8), cache.view(torch.uint8)), "the cache was changed elsewhere"
    assert worst < TOLERANCES[dtype], worst
    return worst

"""Paged attention against plain fp64 arithmetic, over odd shapes, with poison in every cell that must not be read."""
from __future__ import annotations

import random

import pytest
import torch

from lora_bench.kernels.attention import PLAIN, Scores, Span, cache_write_, causal_mask, paged_attention, windowed

BLOCK = 16


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 0, scale: float | None = None, cap: float = 0.0,
) -> torch.Tensor:
    """q [rows, heads, d], k, v [length, kv_heads, d]; rows are the last of length; loops, fp64."""
    rows, heads, d = q.shape
    length, kv_heads, _ = k.shape
    out = torch.empty(rows, heads, d, dtype=torch.float64)
    for row in range(rows):
        sees = length - rows + row + 1
        first = max(0, sees - window) if window else 0
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = k[first:sees, shared].double() @ q[row, head].double() * (d**-0.5 if scale is None else scale)
            scores = cap * (scores / cap).tanh() if cap else scores
            out[row, head] = scores.softmax(0) @ v[first:sees, shared].double()
    return out.flatten(1)


def _span(start: int, rows: int, length: int, blocks: list[int]) -> Span:
    consecutive = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    return Span(start, rows, length, blocks[0] if consecutive else -1, None if consecutive else torch.tensor(blocks),
                causal_mask(rows, length, torch.device("cpu")))


@pytest.mark.parametrize("heads,kv_heads,d", [(9, 3, 64), (4, 4, 8), (6, 1, 20), (8, 2, 128)])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("window, scores",
                         [(0, PLAIN), (9, PLAIN), (33, Scores(0.3)), (16, Scores(None, 1.5)), (0, Scores(0.7, 0.9)), (1, PLAIN)])
def test_matches_plain_arithmetic(heads: int, kv_heads: int, d: int, scattered: bool, window: int, scores: Scores,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_bench.kernels.attention.CAPPED_SCORES", random.choice((1, 2000, 1 << 24)))
    seed = random.randrange(1 << 31)
    print("seed", seed)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cache = torch.full((40, BLOCK, 2 * kv_heads, d), float("nan"))
    order = list(range(40))
    if scattered:
        rng.shuffle(order)
    spans, queries, expected, start = [], [], [], 0
    for rows, length in [(1, 1), (1, 16), (1, 53), (7, 7), (33, 33), (5, 40), (17, 33), (2, 17)]:
        blocks = [order.pop() for _ in range(-(-length // BLOCK))][:: 1 if scattered else -1]
        q, kv = torch.randn(rows, heads, d), torch.randn(length, 2 * kv_heads, d)
        cache_write_(cache, torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]), kv)
        span = _span(start, rows, length, blocks)
        spans.append(windowed(span, window, torch.device("cpu")) if window else span)
        queries.append(q)
        expected.append(_plain(q, kv[:, :kv_heads], kv[:, kv_heads:], window, scores.scale, scores.softcap))
        start += rows
    got = paged_attention(torch.cat(queries), cache, spans, scores)
    assert got.shape == (start, heads * d)
    torch.testing.assert_close(got.double(), torch.cat(expected), atol=2e-5, rtol=1e-4)


def test_a_consecutive_run_is_read_without_a_copy() -> None:
    from lora_bench.kernels.attention import _stored

    cache = torch.randn(8, BLOCK, 2, 4)
    view = _stored(cache, Span(0, 1, 20, 3))
    assert view.data_ptr() == cache[3].data_ptr() and view.shape == (20, 2, 4)


def test_a_window_reads_no_more_than_it_needs() -> None:
    from lora_bench.kernels.attention import _stored

    cache = torch.randn(8, BLOCK, 2, 4)
    span = windowed(Span(0, 1, 50, 3), 10, torch.device("cpu"))
    stored = _stored(cache, span)
    assert (span.skip, span.mask) == (40, None) and stored.data_ptr() == cache[5, 8].data_ptr() and len(stored) == 10
    scattered = windowed(Span(0, 1, 50, -1, torch.tensor([7, 1, 4, 2])), 10, torch.device("cpu"))
    assert torch.equal(_stored(cache, scattered), torch.cat((cache[4, 8:], cache[2, :2])))
    short = Span(0, 5, 9, 3, None, causal_mask(5, 9, torch.device("cpu")))
    assert windowed(short, 9, torch.device("cpu")) is short, "a window that reaches all changes nothing"

"""The attention kernels under Triton's interpreter: tiny shapes in fp32 and fp16, every branch once."""
from __future__ import annotations

import random

import pytest
import torch
from attention_cases import check_decode, decode_case
from interleaved import interleaved
from test_attention import BLOCK, _blocks, _cells, _plain, _poisoned, _runs
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels.attention import PLAIN, Scores, Span, cache_write_, paged_attention, reaches
from lora_bench.kernels.decode_attention import AttentionWork, decode_attention
from lora_bench.kernels.prefill_attention import Pieces


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@interpreted
@pytest.mark.parametrize("kind", [
    {"heads": 6, "kv_heads": 2, "size": 16}, {"heads": 3, "kv_heads": 3, "size": 20, "normed": True, "rotary": 10, "dtype": torch.float16},
    {"heads": 20, "kv_heads": 1, "size": 8, "softcap": 1.5, "rotary": 0}, {"heads": 3, "kv_heads": 1, "size": 32, "window": 70},
], ids=str)
def test_decode(kind: dict, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_bench.kernels.decode_attention.ROW_PROGRAMS", 1)
    case = decode_case(rng, [0, -1, 64, rng.randint(65, 300)], width=rng.choice((0, 3)), rope_start=2, **kind)
    work = AttentionWork(len(case.qkv) + 1, case.heads, torch.device("cpu"))
    work.parts.fill_(float("nan"))
    work.sums.fill_(float("nan"))
    out, cache = case.run(decode_attention, work)
    check_decode(case, out, cache)
    monkeypatch.setattr("lora_bench.kernels.decode_attention.FILLED", 1)
    alone, _ = case.run(decode_attention, work)
    assert torch.equal(alone.nan_to_num(7), out.nan_to_num(7)), "bits depend on how many programs share a row"
    assert not work.arrived.any()


@interpreted
@pytest.mark.parametrize("programs", [1, 528])
def test_decode_of_rows_with_more_stretches(programs: int, seed: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of just so many tokens that it has half as many stretches as it could, others of more; programs that run at once."""
    monkeypatch.setattr("lora_bench.kernels.decode_attention.ROW_PROGRAMS", 1)
    monkeypatch.setattr("lora_bench.kernels.decode_attention.LONG", 600)
    monkeypatch.setattr("lora_bench.kernels.decode_attention.FILLED", programs)
    case = decode_case(rng, [600, 601, rng.randint(1100, 1300)], 3, 1, 16)
    work = AttentionWork(3, case.heads, torch.device("cpu"))
    work.parts.fill_(float("nan"))
    work.sums.fill_(float("nan"))
    out, cache = case.run(decode_attention, work)
    check_decode(case, out, cache)
    work.parts.fill_(float("nan"))
    work.sums.fill_(float("nan"))
    with interleaved(seed, 7):
        again = case.run(decode_attention, work)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip((out, cache), again, strict=True))
    assert not work.arrived.any()


@interpreted
@pytest.mark.parametrize("heads, kv_heads, size, window, scores", [
    (6, 2, 16, 0, PLAIN), (3, 1, 20, 70, PLAIN), (4, 4, 8, 0, Scores(0.7, 0.9)), (20, 1, 16, 9, Scores(None, 1.5)),
], ids=str)
def test_prefill(heads: int, kv_heads: int, size: int, window: int, scores: Scores, seed: int, rng: random.Random) -> None:
    caches = _poisoned(50, kv_heads, size)
    free, spans, queries, expected, start = list(range(50)), [], [], [], 0
    for rows, length in [(1, 1), (20, 70), (1, 300), (5, 270)]:
        blocks = _blocks(rng, "a few runs", -(-length // BLOCK), free)
        q, kv = torch.randn(rows, heads, size), torch.randn(length, 2 * kv_heads, size)
        cache_write_(caches[0], _cells(blocks, length), kv)
        spans.append(Span(start, rows, length, _runs(blocks)))
        queries.append(q)
        expected.append(_plain(q, kv[:, :kv_heads], kv[:, kv_heads:], window, scores.scale, scores.softcap))
        start += rows
    pieces = reaches(spans, caches, heads, window, scores)
    assert isinstance(pieces, Pieces) and (pieces.pieces[:, 7] > 1).any() == (not window)
    pieces.parts.fill_(float("nan"))
    pieces.sums.fill_(float("nan"))
    wide = torch.cat((torch.cat(queries), torch.full((start, 3, size), float("nan"))), 1)
    got = paged_attention(wide[:, :heads], caches[0], pieces, scores)
    torch.testing.assert_close(got.double(), torch.cat(expected), atol=2e-5, rtol=1e-4)
    pieces.parts.fill_(float("nan"))
    pieces.sums.fill_(float("nan"))
    with interleaved(seed, 7):
        assert torch.equal(got, paged_attention(wide[:, :heads], caches[0], pieces, scores)) and not pieces.arrived.any()
    alone = paged_attention(queries[2], caches[0], reaches([Span(0, 1, 300, spans[2].runs)], caches, heads, window, scores), scores)
    assert torch.equal(alone[0], got[spans[2].start])


@interpreted
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_no_bad_query_is_hidden(softcap: float, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_bench.kernels.decode_attention.ROW_PROGRAMS", 1)
    bad = rng.choice((float("nan"), float("inf"), -float("inf")))
    case = decode_case(rng, [0, 70], 3, 1, 16, softcap=softcap)
    row = rng.randrange(2)
    case.qkv[row, rng.randrange(3 * 16)] = bad
    out, _ = case.run(decode_attention, AttentionWork(2, case.heads, torch.device("cpu")))
    assert out.isfinite().all(1).tolist() == [row == 1, row == 0]
    caches = torch.randn(1, 2, 1, 5, BLOCK, 16)
    q = torch.randn(2, 3, 16)
    q[row, rng.randrange(3), rng.randrange(16)] = bad
    scores = Scores(None, softcap)
    got = paged_attention(q, caches[0], reaches([Span(0, 2, 40, ((2, 3),))], caches, 3, 0, scores), scores)
    assert got.isfinite().all(1).tolist() == [row == 1, row == 0]

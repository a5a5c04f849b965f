"""The pieces that a step's attention is cut into, and on a GPU the kernel that takes them, against fp64 arithmetic."""
from __future__ import annotations

import random

import pytest
import torch
from test_attention import BLOCK, _blocks, _cells, _poisoned, _runs

from lora_bench.kernels.attention import PLAIN, Scores, Span, cache_write_, paged_attention, reaches
from lora_bench.kernels.prefill_attention import Pieces, cut_pieces

GPU = pytest.mark.gpu
TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LENGTHS = [(1, 700), (130, 130), (300, 1111), (17, 2000), (1, 1), (64, 64), (1, 33), (5, 40), (1, 5000)]


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def _spans(rng: random.Random, lengths: list[tuple[int, int]], layout: str, blocks: int) -> tuple[list[Span], list[list[int]]]:
    free, spans, held, start = list(range(blocks)), [], [], 0
    for rows, length in lengths:
        held.append(_blocks(rng, layout, -(-length // BLOCK), free))
        spans.append(Span(start, rows, length, _runs(held[-1])))
        start += rows
    return spans, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, size", [(32, 8, 128), (9, 3, 64), (4, 4, 20), (71, 1, 8), (8, 4, 256)])
@pytest.mark.parametrize("window", [0, 1, 300])
def test_every_row_meets_each_token_once(heads: int, kv_heads: int, size: int, dtype: torch.dtype, window: int, rng: random.Random) -> None:
    lengths = rng.sample(LENGTHS, len(LENGTHS)) + [(900, 1000)] * rng.randrange(2)
    spans, held = _spans(rng, lengths, rng.choice(("one run", "scattered")), 700)
    cut = cut_pieces(spans, torch.empty(1, 2, kv_heads, 700, BLOCK, size, dtype=dtype), heads, window)
    met = [torch.zeros(span.rows, span.length, dtype=torch.int) for span in spans]
    parts: dict[int, set[int]] = {}
    taken = torch.zeros(len(cut.parts), dtype=torch.int)
    for row, rows, position, table, first, end, split, splits, part, counter in cut.pieces.tolist():
        span = spans[table]
        offset = row - span.start
        assert 0 <= offset and offset + rows <= span.rows and position == span.length - span.rows + offset and end <= position + rows
        met[table][offset : offset + rows, first:end] += 1
        if splits > 1:
            assert split not in parts.setdefault(counter, set())
            parts[counter].add(split)
            group = heads // kv_heads
            taken[part + split * rows * group : part + (split + 1) * rows * group] += 1
            assert len(parts[counter]) <= splits
    assert sorted(parts) == list(range(len(cut.arrived))) and (taken == 1).all()
    for span, each, blocks, table in zip(spans, met, held, cut.tables.tolist(), strict=True):
        assert table[: len(blocks)] == blocks
        place = torch.arange(span.length - span.rows, span.length)[:, None]
        token = torch.arange(span.length)
        sees = (token <= place) & (token > place - window if window else True)
        assert (each[sees] == 1).all() and (each <= 1).all()


def test_what_runs_beside_a_request_does_not_change_how_it_is_cut(rng: random.Random) -> None:
    """As long as the shape is the same; else tiles are others, and no row's sums depend on that."""
    caches = torch.empty(1, 2, 3, 700, BLOCK, 64, dtype=torch.bfloat16)
    spans, _ = _spans(rng, LENGTHS, "scattered", 700)
    together = cut_pieces(spans, caches, 9).pieces.tolist()
    for number, span in enumerate(spans):
        alone = cut_pieces([Span(0, span.rows, span.length, span.runs)], caches, 9).pieces.tolist()
        mine = [[row - span.start, rows, position, 0, *rest[:4]] for row, rows, position, table, *rest in together if table == number]
        assert sorted(mine) == sorted(piece[:8] for piece in alone)


def _filled(rng: random.Random, lengths: list[tuple[int, int]], heads: int, kv_heads: int, size: int, dtype: torch.dtype,
            ) -> tuple[torch.Tensor, list[Span], torch.Tensor, list[torch.Tensor]]:
    """caches, spans, q (a view of wider rows) and each span's keys and values, on the GPU; cells of nobody are NaN."""
    caches = _poisoned(700, kv_heads, size, dtype=dtype).cuda()
    spans, held = _spans(rng, lengths, "scattered", 700)
    kept = []
    for span, blocks in zip(spans, held, strict=True):
        kept.append(torch.randn(span.length, 2 * kv_heads, size).to(dtype).cuda())
        cache_write_(caches[0], _cells(blocks, span.length).cuda(), kept[-1])
    q = torch.randn(sum(span.rows for span in spans), heads + 2 * kv_heads, size).to(dtype).cuda()
    return caches, spans, q[:, :heads], kept


def _expected(q: torch.Tensor, kept: torch.Tensor, window: int, scores: Scores) -> torch.Tensor:
    rows, heads, size = q.shape
    length, kv_heads = kept.shape[0], kept.shape[1] // 2
    k, v = kept.double().split(kv_heads, 1)
    products = torch.einsum("rkgd,tkd->kgrt", q.double().reshape(rows, kv_heads, -1, size), k) * (scores.scale or size**-0.5)
    products = scores.softcap * (products / scores.softcap).tanh() if scores.softcap else products
    place, token = torch.arange(length - rows, length, device=q.device)[:, None], torch.arange(length, device=q.device)
    hidden = (token > place) | (token <= place - window if window else False)
    return torch.einsum("kgrt,tkd->rkgd", products.masked_fill(hidden, float("-inf")).softmax(-1), v).reshape(rows, -1)


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=GPU) for dtype in TOLERANCES], ids=str)
@pytest.mark.parametrize("heads, kv_heads, size", [(32, 8, 128), (9, 3, 64), (16, 1, 80), (8, 4, 256)])
@pytest.mark.parametrize("window, scores", [(0, PLAIN), (300, Scores(0.05)), (0, Scores(None, 1.5))], ids=str)
def test_the_kernel_matches_plain_arithmetic(
    heads: int, kv_heads: int, size: int, window: int, scores: Scores, dtype: torch.dtype, rng: random.Random,
) -> None:
    caches, spans, q, kept = _filled(rng, LENGTHS, heads, kv_heads, size, dtype)
    pieces = reaches(spans, caches, heads, window, scores)
    assert isinstance(pieces, Pieces)
    pieces.parts.fill_(float("nan"))
    pieces.sums.fill_(float("nan"))
    got = paged_attention(q, caches[0], pieces, scores)
    assert torch.equal(got, paged_attention(q, caches[0], pieces, scores)) and not pieces.arrived.any()
    for span, each in zip(spans, kept, strict=True):
        mine = slice(span.start, span.start + span.rows)
        expected = _expected(q[mine], each, window, scores)
        assert float(((got[mine] - expected).norm(dim=1) / expected.norm(dim=1)).max()) < TOLERANCES[dtype]
        one = reaches([Span(0, span.rows, span.length, span.runs)], caches, heads, window, scores)
        alone = paged_attention(q[mine], caches[0], one, scores)
        assert torch.equal(alone, got[mine]), "a request's rows depend on what runs beside it"


@pytest.mark.parametrize("window", [pytest.param(window, marks=GPU) for window in (0, 400)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tiles_of_many_rows_change_no_bit(window: int, dtype: torch.dtype, rng: random.Random) -> None:
    caches, spans, q, _ = _filled(rng, [(20, 1500), (2048, 2300), (1, 900), (40, 700)], 32, 8, 128, dtype)
    together = reaches(spans, caches, 32, window)
    got = paged_attention(q, caches[0], together)
    for span in (spans[0], spans[2], spans[3]):
        mine = slice(span.start, span.start + span.rows)
        alone = reaches([Span(0, span.rows, span.length, span.runs)], caches, 32, window)
        assert alone.shape.queries < together.shape.queries
        assert torch.equal(paged_attention(q[mine], caches[0], alone), got[mine])


@pytest.mark.parametrize("scores", [pytest.param(scores, marks=GPU) for scores in (PLAIN, Scores(None, 1.5))], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_kernel_hides_no_bad_query(bad: float, scores: Scores, rng: random.Random) -> None:
    caches, spans, q, _ = _filled(rng, [(3, 40), (1, 1), (1, 700)], 6, 2, 64, torch.bfloat16)
    row = rng.randrange(5)
    q[row, rng.randrange(6), rng.randrange(64)] = bad
    fine = paged_attention(q, caches[0], reaches(spans, caches, 6, 0, scores), scores).isfinite().all(1).tolist()
    assert fine == [each != row for each in range(5)]

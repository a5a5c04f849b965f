"""Paged attention against plain fp64 arithmetic, over odd shapes and layouts of runs, with poison in every cell that must not be read."""
from __future__ import annotations

import random

import pytest
import torch

from lora_bench.kernels.attention import PLAIN, Reach, Scores, Span, _stored, cache_write_, copy_block_, paged_attention, reaches

BLOCK = 16
SHAPES = [(9, 3, 64), (4, 4, 8), (6, 1, 20), (8, 2, 128)]
LENGTHS = [(1, 1), (1, 16), (1, 53), (7, 7), (33, 33), (5, 40), (17, 33), (2, 17)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


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


def _runs(blocks: list[int]) -> tuple[tuple[int, int], ...]:
    runs: list[list[int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return tuple((first, count) for first, count in runs)


def _blocks(rng: random.Random, layout: str, count: int, free: list[int]) -> list[int]:
    """`count` blocks out of `free` (ascending), which loses them: in one run, in a few out of order, or one here and one there."""
    if layout == "one run":
        taken = free[:count]
    elif layout == "scattered":
        taken = rng.sample(free, count)
    else:
        cuts = sorted(rng.sample(range(1, count), min(count - 1, rng.randint(1, 3)))) if count > 1 else []
        pieces = [free[start:end] for start, end in zip([0, *cuts], [*cuts, count], strict=True)]
        rng.shuffle(pieces)
        taken = sum(pieces, [])
    free[:] = [block for block in free if block not in taken]
    return taken


def _cells(blocks: list[int], length: int) -> torch.Tensor:
    return torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])


def _poisoned(blocks: int, kv_heads: int, d: int, layers: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((layers, 2, kv_heads, blocks, BLOCK, d), float("nan"), dtype=dtype)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(1 << 31)
    print("seed", seed)
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads,kv_heads,d", SHAPES)
@pytest.mark.parametrize("layout", ["one run", "a few runs", "scattered"])
@pytest.mark.parametrize("window, scores",
                         [(0, PLAIN), (9, PLAIN), (33, Scores(0.3)), (16, Scores(None, 1.5)), (0, Scores(0.7, 0.9)), (1, PLAIN)])
def test_matches_plain_arithmetic(heads: int, kv_heads: int, d: int, layout: str, window: int, scores: Scores, device: str,
                                  rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_bench.kernels.attention.CAPPED_SCORES", rng.choice((1, 2000, 1 << 24)))
    caches = _poisoned(40, kv_heads, d).to(device)
    free, spans, queries, expected, start = list(range(40)), [], [], [], 0
    for rows, length in LENGTHS:
        blocks = _blocks(rng, layout, -(-length // BLOCK), free)
        q, kv = torch.randn(rows, heads, d), torch.randn(length, 2 * kv_heads, d)
        cache_write_(caches[0], _cells(blocks, length).to(device), kv.to(device))
        spans.append(Span(start, rows, length, _runs(blocks)))
        queries.append(q)
        expected.append(_plain(q, kv[:, :kv_heads], kv[:, kv_heads:], window, scores.scale, scores.softcap))
        start += rows
    got = paged_attention(torch.cat(queries).to(device), caches[0], reaches(spans, caches, heads, window, scores), scores)
    assert got.shape == (start, heads * d)
    torch.testing.assert_close(got.double().cpu(), torch.cat(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("scores", [PLAIN, Scores(None, 1.5)])
@pytest.mark.parametrize("window", [0, 9])
def test_short_dtypes(dtype: torch.dtype, tolerance: float, scores: Scores, window: int, device: str, rng: random.Random) -> None:
    heads, kv_heads, d = 6, 2, 16
    caches = _poisoned(40, kv_heads, d, dtype=dtype).to(device)
    free, spans, queries, expected, start = list(range(40)), [], [], [], 0
    for rows, length in LENGTHS:
        blocks = _blocks(rng, "a few runs", -(-length // BLOCK), free)
        q, kv = torch.randn(rows, heads, d).to(dtype), torch.randn(length, 2 * kv_heads, d).to(dtype)
        cache_write_(caches[0], _cells(blocks, length).to(device), kv.to(device))
        spans.append(Span(start, rows, length, _runs(blocks)))
        queries.append(q)
        expected.append(_plain(q, kv[:, :kv_heads], kv[:, kv_heads:], window, scores.scale, scores.softcap))
        start += rows
    got = paged_attention(torch.cat(queries).to(device), caches[0], reaches(spans, caches, heads, window, scores), scores)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double().cpu(), torch.cat(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads,kv_heads,d", [*SHAPES, (8, 1, 256)])
@pytest.mark.parametrize("window", [0, 50])
def test_one_row_more_than_a_tile(heads: int, kv_heads: int, d: int, window: int, device: str, rng: random.Random) -> None:
    """Fused kernels take 32, 64 or 128 rows at a time; what is left may be one."""
    for rows in (33, 65, 129, 193):
        length = rows + rng.randint(1, 60)
        caches = _poisoned(20, kv_heads, d).to(device)
        q, kv = torch.randn(rows, heads, d), torch.randn(length, 2 * kv_heads, d)
        cache_write_(caches[0], torch.arange(BLOCK, BLOCK + length, device=device), kv.to(device))
        spans = [Span(0, rows, length, ((1, -(-length // BLOCK)),))]
        got = paged_attention(q.to(device), caches[0], reaches(spans, caches, heads, window)).double().cpu().view(rows, heads, d)
        for row in (0, rows - 2, rows - 1):
            seen = kv[: length - rows + row + 1].double()
            last = _plain(q[row : row + 1], seen[:, :kv_heads], seen[:, kv_heads:], window).view(heads, d)
            torch.testing.assert_close(got[row], last, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scores", [PLAIN, Scores(None, 1.5)])
@pytest.mark.parametrize("window", [0, 40])
def test_where_blocks_lie_changes_no_bit(window: int, scores: Scores, rng: random.Random) -> None:
    heads, kv_heads, d = 9, 3, 32
    for rows, length in [(1, 200), (1, 33), (20, 150), (48, 48)]:
        q, kv = torch.randn(rows, heads, d), torch.randn(length, 2 * kv_heads, d)
        got = []
        for layout in ("one run", "a few runs", "scattered"):
            caches = _poisoned(30, kv_heads, d)
            blocks = _blocks(rng, layout, -(-length // BLOCK), list(range(rng.randint(0, 9), 30)))
            cache_write_(caches[0], _cells(blocks, length), kv)
            seen = reaches([Span(0, rows, length, _runs(blocks))], caches, heads, window, scores)
            got.append(paged_attention(q, caches[0], seen, scores))
        assert got[0].isfinite().all() and torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def _one(caches: torch.Tensor, *runs: tuple[int, int], rows: int, length: int, window: int = 0) -> Reach:
    return reaches([Span(0, rows, length, runs)], caches, caches.shape[2], window)[0]


def test_a_single_run_is_read_without_a_copy() -> None:
    caches = torch.randn(2, 2, 3, 8, BLOCK, 4)
    k, v = _stored(caches[1], _one(caches, (3, 2), rows=1, length=20))
    assert k.data_ptr() == caches[1, 0, 0, 3].data_ptr() and v.data_ptr() == caches[1, 1, 0, 3].data_ptr()
    assert k.shape == v.shape == (1, 3, 20, 4) and torch.equal(k[0], caches[1, 0, :, 3:5].flatten(1, 2)[:, :20])


def test_a_window_reads_no_more_than_it_needs() -> None:
    caches = torch.randn(1, 2, 1, 8, BLOCK, 4)
    reach = _one(caches, (3, 4), rows=1, length=50, window=10)
    k, _ = _stored(caches[0], reach)
    assert reach.mask is None and k.data_ptr() == caches[0, 0, 0, 5, 8].data_ptr() and k.shape[2] == 10
    _, v = _stored(caches[0], _one(caches, (7, 1), (1, 1), (4, 1), (2, 1), rows=1, length=50, window=10))
    assert torch.equal(v[0, 0], torch.cat((caches[0, 1, 0, 4, 8:], caches[0, 1, 0, 2, :2])))
    joined = _one(caches, (7, 1), (1, 3), rows=1, length=50, window=10)
    assert joined.blocks is None, "the runs that the window passed are not gathered"
    assert torch.equal(_one(caches, (3, 1), rows=5, length=9, window=9).mask, _one(caches, (3, 1), rows=5, length=9).mask)


def test_masks_are_made_for_rows_that_do_not_see_all() -> None:
    caches = torch.empty(1, 2, 1, 8, BLOCK, 4)
    assert _one(caches, (0, 1), rows=1, length=9).mask is None and _one(caches, (0, 1), rows=9, length=9).mask is None
    mask = _one(caches, (0, 2), rows=3, length=20, window=4).mask
    assert mask.dtype == caches.dtype and mask.stride(0) % 16 == 0
    inf = float("inf")
    assert mask.tolist() == [[0, 0, 0, 0, -inf, -inf], [-inf, 0, 0, 0, 0, -inf], [-inf, -inf, 0, 0, 0, 0]]


def test_a_block_is_copied_in_every_layer_and_nothing_else_is_touched(rng: random.Random) -> None:
    caches = torch.randn(3, 2, 2, 7, BLOCK, 4)
    before = caches.clone()
    source, target = rng.sample(range(7), 2)
    cells = rng.randint(1, BLOCK)
    copy_block_(caches, source, target, cells)
    assert torch.equal(caches[:, :, :, target, :cells], before[:, :, :, source, :cells])
    caches[:, :, :, target, :cells] = before[:, :, :, target, :cells]
    assert torch.equal(caches, before)

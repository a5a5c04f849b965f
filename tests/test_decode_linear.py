"""What the linears of a decode step mean: the reference against the formula, written out number by number."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lora_bench.kernels.decode_linear import Glu, Residual, RowSquares, decode_linear
from lora_bench.kernels.rank_pages import MAX_PAGES, RankPool, RankRows

ROWS, D_IN, ENDS = 3, 5, (4, 6, 10)


def _rank_rows(adapters: list[int], pages: list[int]) -> RankRows:
    table = torch.full((1 + 2 * MAX_PAGES,), 77, dtype=torch.int32)
    table[0] = len(pages)
    table[1 : 1 + len(pages)] = torch.tensor(pages)
    table[1 + MAX_PAGES : 1 + MAX_PAGES + len(pages)] = torch.tensor(adapters)
    pool = RankPool(torch.randn(6, 2, len(ENDS), 16, D_IN), torch.randn(6, 2, ENDS[-1], 16), ENDS)
    return RankRows(pool, 1, table, torch.randn(ROWS, 3))


def _product(x: Tensor, weight: Tensor, rank: RankRows, t: int, o: int) -> float:
    """One number of x W^T + what the rank rows add."""
    total = sum(float(x[t, d]) * float(weight[o, d]) for d in range(D_IN))
    part = next(index for index, end in enumerate(ENDS) if o < end)
    for place in range(int(rank.pages[0])):
        page, column = int(rank.pages[1 + place]), int(rank.pages[1 + MAX_PAGES + place])
        for r in range(16):
            h = sum(float(x[t, d]) * float(rank.pool.a[page, 1, part, r, d]) for d in range(D_IN))
            total += float(rank.weights[t, column]) * h * float(rank.pool.b[page, 1, o, r])
    return total


@pytest.mark.parametrize("glu", ["", "silu", "gelu_tanh"])
def test_formula(glu: Glu, seed: int) -> None:
    x, weight, bias = torch.randn(ROWS, D_IN), torch.randn(ENDS[-1], D_IN), torch.randn(ENDS[-1])
    rank = _rank_rows([2, 0, 0], [5, 1, 3])
    norm = RowSquares(torch.rand(4, ROWS) * 9, 7, 1e-2)
    out = torch.full((ROWS, ENDS[-1] // (2 if glu else 1)), torch.nan)
    decode_linear(x, weight, bias, out, norm=norm, glu=glu, rank=rank)
    act = {"silu": lambda v: v / (1 + math.exp(-v)),
           "gelu_tanh": lambda v: v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))}
    for t in range(ROWS):
        rms = math.sqrt(float(norm.parts[:, t].double().sum()) / 7 + 1e-2)
        y = [_product(x, weight, rank, t, o) / rms + float(bias[o]) for o in range(ENDS[-1])]
        if glu:
            y = [act[glu](gate) * up for gate, up in zip(y[: len(y) // 2], y[len(y) // 2 :], strict=True)]
        torch.testing.assert_close(out[t], torch.tensor(y), rtol=1e-4, atol=1e-3)


def test_residual(seed: int) -> None:
    x, weight, before = torch.randn(ROWS, D_IN), torch.randn(8, D_IN), torch.randn(ROWS, 8)
    stream, out, parts = before.clone(), torch.full((ROWS, 8), torch.nan), torch.full((3, ROWS), torch.nan)
    residual = Residual(stream, torch.randn(8), RowSquares(parts, 8, 1e-5), scale=0.25)
    decode_linear(x, weight, None, out, residual=residual)
    torch.testing.assert_close(stream, before + 0.25 * x @ weight.T)
    torch.testing.assert_close(out, stream * residual.next_weight)
    torch.testing.assert_close(parts.sum(0), stream.square().sum(1))


def test_without_active_pages(seed: int) -> None:
    x, weight, rank = torch.randn(ROWS, D_IN), torch.randn(ENDS[-1], D_IN), _rank_rows([], [])
    base, other = torch.empty(ROWS, ENDS[-1]), torch.empty(ROWS, ENDS[-1])
    decode_linear(x, weight, None, base)
    decode_linear(x, weight, None, other, rank=rank)
    assert torch.equal(base, other)

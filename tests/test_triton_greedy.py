"""The best token of each row, as kernels, against torch."""
from __future__ import annotations

import random

import pytest
import torch
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels.greedy import GreedyWork, greedy

CASES = [(1, 50), (3, 64), (5, 8200), (2, 1)]


def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize(("rows", "vocab"), CASES)
@interpreted
def test_kernel(rows: int, vocab: int, seed: int) -> None:
    _compare(rows, vocab, torch.float16, torch.device("cpu"))


@pytest.mark.parametrize(("rows", "vocab"), CASES)
def test_without_triton(rows: int, vocab: int, seed: int) -> None:
    _compare(rows, vocab, torch.float32, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [*CASES, (64, 128256), (33, 49152), (8, 1 << 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_gpu(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _compare(rows, vocab, dtype, torch.device("cuda"))


def _compare(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """With equal best ones in every other row, rows of very small numbers, and rows that are not finite at any place."""
    logits = torch.randn(rows + 2, vocab).to(dtype)
    expected = logits.float().argmax(-1)
    for row in range(1, rows, 2):
        places = sorted(random.sample(range(vocab), min(3, vocab)))
        logits[row, places] = 60.0
        expected[row] = places[0]
    logits[rows - 1] -= 1000.0
    expected[rows - 1] = logits[rows - 1].float().argmax()
    for row in random.sample(range(rows), rows // 3):
        logits[row, random.randrange(vocab)], expected[row] = random.choice((torch.nan, torch.inf, -torch.inf)), -1
    tokens, work = torch.full((rows + 3,), -7, dtype=torch.int64, device=device), GreedyWork(rows, device)
    work.values.fill_(torch.nan)
    greedy(logits.to(device)[:rows], tokens[:rows], work)
    assert tokens[:rows].tolist() == expected[:rows].tolist() and (tokens[rows:] == -7).all()

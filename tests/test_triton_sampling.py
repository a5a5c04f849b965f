"""Drawing on the device beside `sample`: under Triton's interpreter in tiny shapes, and on a CUDA device."""
from __future__ import annotations

import random

import pytest
import torch
from interleaved import interleaved
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels import device_sampling
from lora_bench.kernels.device_sampling import DRAW_WORDS, DeviceSampler
from lora_bench.kernels.sampling import Draw, sample

SETTINGS: list[dict] = [
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8}, {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1e-300},
    {"temperature": 1.0, "top_k": 1 << 20, "top_p": 0.999}, {"repetition_penalty": 1.3}, {"temperature": 0.9, "repetition_penalty": 0.8},
]


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def _tokens(sampler: DeviceSampler, host: torch.Tensor, device: torch.Tensor, logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    sampler.set(draws)
    device.copy_(host)
    tokens = torch.full((len(logits),), -7, device=logits.device)
    sampler.run(logits, tokens)
    return tokens.tolist()


def _check(rng: random.Random, columns: int, turns: int, dtype: torch.dtype, device: str, rows: int = len(SETTINGS) + 1) -> None:
    host = torch.zeros(rows, DRAW_WORDS, dtype=torch.int64)
    on_device = torch.zeros_like(host, device=device)
    sampler = DeviceSampler(host.numpy(), on_device, columns)
    for turn in range(turns):
        logits = (torch.randn(rows, columns) * rng.choice((0.5, 3.0))).to(dtype).to(device)
        draws = []
        for settings in rng.sample(SETTINGS, rows - 1):
            vocab = rng.choice((0, columns, columns - rng.randrange(1, columns // 2)))
            seen = torch.rand(vocab or columns, device=device) < 0.3
            draws.append(Draw(**settings, seed=rng.randrange(-9, 1 << 64), position=rng.randrange(1000), seen=seen, vocab=vocab))
        bad = rng.randrange(rows - 1)
        wrong = [float("nan"), float("inf"), float("-inf")]
        logits[bad, rng.randrange(draws[bad].vocab or columns)] = rng.choice(wrong)
        for row, draw in enumerate(draws):
            logits[row, draw.vocab or columns:] = rng.choice(wrong)
        expected = sample(logits.cpu(), [
            Draw(**{**{name: getattr(draw, name) for name in Draw.__slots__}, "seen": draw.seen.cpu()}) for draw in draws] + [Draw()])
        assert _tokens(sampler, host, on_device, logits, draws) == expected, (turn, draws)
        assert expected[bad] == -1


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_draws_are_those_of_the_cpu(dtype: torch.dtype, seed: int) -> None:
    _check(random.Random(seed), 700, 2, dtype, "cpu")


@interpreted
@pytest.mark.parametrize("rows", [3, 6])
def test_programs_that_run_at_once(rows: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a row draw from what all of them found, in whatever order they run."""
    monkeypatch.setattr(device_sampling, "PARTS", 4)
    for resident in (4, 99):
        with interleaved(seed, resident):
            _check(random.Random(seed + resident), 1700, 1, torch.bfloat16, "cpu", rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1000, 32_000, 128_256])
def test_on_gpu(columns: int, dtype: torch.dtype, seed: int) -> None:
    for rows in (len(SETTINGS) + 1, 4):
        _check(random.Random(seed), columns, 5 if columns < 100_000 else 2, dtype, "cuda", rows)

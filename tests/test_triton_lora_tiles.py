"""The tiled low-rank kernels: under Triton's interpreter in tiny shapes, and on a CUDA device."""
from __future__ import annotations

import random

import pytest
import torch
from interleaved import interleaved
from lora_tile_cases import MIXED, tile_case
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels import lora_tiles
from lora_bench.kernels.decode_linear import Glu
from lora_bench.kernels.lora_tiles import SideStream

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@interpreted
@pytest.mark.parametrize("rows, d_in, ends, ranks, least, dtype", [
    (5, 48, (40,), (16,), 256, torch.float32), (70, 64, (24, 36, 52), (5, 40), 256, torch.float16),
    (90, 330, (140, 280), (8, 17, 16), 64, torch.float32), (70, 128, (24, 36, 52), (5, 40), 32, torch.float32),
    (1, 64, (150,), (3,), 256, torch.float32),
], ids=str)
def test_kernels(
    rows: int, d_in: int, ends: tuple[int, ...], ranks: tuple[int, ...], least: int, dtype: torch.dtype, seed: int, rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lora_tiles, "LEAST_DEPTH", least)
    case = tile_case(rng, rows, d_in, ends, ranks, dtype)
    counters = case.tiles.arrivals.numel()
    assert counters >= case.tiles.count * -(-case.tiles.lists[0].most * len(ends) // lora_tiles.UNITS)
    usual = case.run()
    case.check(usual, TOLERANCE[dtype])
    for turn in range(3):
        case.tiles.partials.fill_(float("nan"))
        with interleaved(seed + turn, 7):
            assert torch.equal(usual, case.run())
    assert not case.tiles.arrivals.any()


@interpreted
@pytest.mark.parametrize("rows, width, ranks, glu, dtype", [
    (70, 72, (5, 40), "silu", torch.float32), (5, 20, (16,), "gelu_tanh", torch.float16),
], ids=str)
def test_gate(rows: int, width: int, ranks: tuple[int, ...], glu: Glu, dtype: torch.dtype, rng: random.Random) -> None:
    tile_case(rng, rows, 48, (width, 2 * width), ranks, dtype).check_gate(glu, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows, width, ranks, glu", [
    (640, 4096, MIXED, "silu"), (17, 1536, (64, 8), "gelu_tanh"), (300, 1031, MIXED, "silu"),
], ids=str)
def test_gate_on_gpu(rows: int, width: int, ranks: tuple[int, ...], glu: Glu, dtype: torch.dtype, rng: random.Random) -> None:
    tile_case(rng, rows, 512, (width, 2 * width), ranks, dtype, "cuda").check_gate(glu, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows, d_in, ends, ranks", [
    (640, 2048, (2048, 2560, 3072), MIXED), (260, 14336, (1024,), (16,)), (17, 576, (1536, 3072), (64, 8)), (3, 1024, (128256,), (16,)),
    (300, 1024, (4099,), MIXED),
], ids=str)
def test_on_gpu(
    rows: int, d_in: int, ends: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lora_tiles, "SIDE_ROWS", 1)
    case = tile_case(rng, rows, d_in, ends, ranks, dtype, "cuda")
    alone = case.run()
    case.check(alone, TOLERANCE[dtype])
    side = SideStream(torch.device("cuda"))
    for _ in range(5):
        assert torch.equal(case.run(side), alone), "neither runs nor streams change a bit"
    assert not case.tiles.arrivals.any()

"""What becomes of heads before attention, under Triton's interpreter and on a CUDA device, against float64."""
from __future__ import annotations

import random

import pytest
import torch
from lora_tile_cases import MIXED, TileCase, tile_case
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels.head_tiles import Turn, head_tiles
from lora_bench.kernels.rope import inverse_frequencies, rope_table

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BLOCK = 16


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def _check(case: TileCase, heads: int, kv_heads: int, size: int, normed: bool, rng: random.Random) -> None:
    tokens, device, dtype = case.y.shape[0], case.y.device, case.y.dtype
    cos, sin = rope_table(inverse_frequencies(size, 1e4), 300, torch.float32, device)
    places = torch.tensor([rng.randrange(300) for _ in range(tokens)], device=device)
    norms = [torch.rand(size, device=device).add(0.5).to(dtype) if normed else None for _ in range(2)]
    turn = Turn(cos[places].unsqueeze(1), sin[places].unsqueeze(1), *norms, 1e-6)
    blocks = tokens // BLOCK + 3
    cells = torch.tensor(rng.sample(range(blocks * BLOCK), tokens), device=device)

    def run(shrunk: bool) -> torch.Tensor:
        """[tokens, heads + 2 * kv_heads, size]: q, and what was written of k and v."""
        cache = torch.full((2, kv_heads, blocks, BLOCK, size), float("nan"), dtype=dtype, device=device)
        qkv = case.y.clone().view(tokens, -1, size)
        q = head_tiles(qkv, heads, turn, cache, cells, case.shrunk() if shrunk else None)
        written = cache.view(2 * kv_heads, -1, size)
        assert int(written.isnan().all(2).sum()) == 2 * kv_heads * (blocks * BLOCK - tokens), "no other cell is touched"
        return torch.cat((q, written[:, cells].transpose(0, 1)), 1).cpu()

    got, plain = run(True), run(False)
    assert torch.equal(got[(case.weights == 0).all(1)], plain[(case.weights == 0).all(1)])
    expected = case.expected().view(tokens, -1, size)
    for part, weight in ((expected[:, :heads], norms[0]), (expected[:, heads:-kv_heads], norms[1])):
        if weight is not None:
            part *= (part.square().mean(2, keepdim=True) + 1e-6).rsqrt() * weight.double().cpu()
    turned = expected[:, :-kv_heads]
    c, s = cos.double().cpu()[places.cpu(), None], sin.double().cpu()[places.cpu(), None]
    turned.copy_(turned * c + turned.roll(size // 2, 2) * s)
    assert (got.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


@interpreted
@pytest.mark.parametrize("rows, heads, kv_heads, size, ranks, normed, dtype", [
    (70, 6, 2, 16, (5, 40), False, torch.float32), (5, 3, 1, 40, (16,), True, torch.float16),
], ids=str)
def test_heads(rows: int, heads: int, kv_heads: int, size: int, ranks: tuple[int, ...], normed: bool, dtype: torch.dtype,
               rng: random.Random) -> None:
    ends = tuple(count * size for count in (heads, heads + kv_heads, heads + 2 * kv_heads))
    _check(tile_case(rng, rows, 48, ends, ranks, dtype), heads, kv_heads, size, normed, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows, heads, kv_heads, size, ranks, normed", [
    (640, 32, 8, 128, MIXED, False), (300, 9, 3, 64, (16,), True), (17, 4, 1, 80, (64, 8), False), (200, 8, 4, 256, MIXED, True),
], ids=str)
def test_heads_on_gpu(rows: int, heads: int, kv_heads: int, size: int, ranks: tuple[int, ...], normed: bool, dtype: torch.dtype,
                      rng: random.Random) -> None:
    ends = tuple(count * size for count in (heads, heads + kv_heads, heads + 2 * kv_heads))
    _check(tile_case(rng, rows, 512, ends, ranks, dtype, "cuda"), heads, kv_heads, size, normed, rng)

"""The norms between the linears of a decode step, as kernels, against their reference."""
from __future__ import annotations

import pytest
import torch
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels.decode_linear import Residual, RowSquares
from lora_bench.kernels.embed_rows import embed_rows, embed_rows_reference
from lora_bench.kernels.residual_norm import residual_norm, residual_norm_reference

CASES = [(rows, width, post, following) for rows, width in ((1, 16), (5, 40), (3, 576)) for post, following in ((0, 1), (1, 0), (1, 1))]


def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize(("rows", "width", "post", "following"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@interpreted
def test_kernel(rows: int, width: int, post: int, following: int, dtype: torch.dtype, seed: int) -> None:
    _compare(rows, width, post, following, dtype, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width", "post", "following"), [*CASES, (64, 4096, 1, 1), (33, 5376, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_gpu(rows: int, width: int, post: int, following: int, dtype: torch.dtype, seed: int) -> None:
    _compare(rows, width, post, following, dtype, torch.device("cuda"))


def _compare(rows: int, width: int, post: int, following: int, dtype: torch.dtype, device: torch.device) -> None:
    y, stream = (torch.randn(rows, width).to(dtype) for _ in range(2))
    weights = [1 + torch.randn(width) / 8 if wanted else None for wanted in (post, following)]
    results = []
    for run, place in ((residual_norm_reference, torch.device("cpu")), (residual_norm, device)):
        mine, out = stream.to(place, copy=True), torch.full((rows, width), torch.nan, dtype=dtype, device=place)
        post_weight, next_weight = (None if weight is None else weight.to(place) for weight in weights)
        run(y.to(place), post_weight, mine, 0.7, next_weight, out, 1e-5)
        results.append((mine.cpu().double(), out.cpu().double()))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert (ours - theirs).norm() <= 2 * torch.finfo(dtype).eps * theirs.norm()


def _embed(dtype: torch.dtype, device: torch.device) -> None:
    table, ids, weight = torch.randn(11, 48).to(dtype), torch.tensor([3, 0, 10]), torch.randn(48).to(dtype)
    results = []
    for run, place in ((embed_rows_reference, torch.device("cpu")), (embed_rows, device)):
        stream, out = (torch.full((3, 48), torch.nan, dtype=dtype, device=place) for _ in range(2))
        parts = torch.full((5, 3), torch.nan, device=place)
        run(ids.to(place), table.to(place), out, Residual(stream, weight.to(place), RowSquares(parts, 48, 0.0), scale=1.5))
        results.append((stream.cpu(), out.cpu(), parts.cpu()))
    assert torch.equal(results[0][0], (table[ids].float() * 1.5).to(dtype))
    torch.testing.assert_close(results[0][1].float(), table[ids].float() * 1.5 * weight.float(), rtol=2e-2, atol=1e-6)
    torch.testing.assert_close(results[0][2].sum(0), (table[ids].float() * 1.5).square().sum(1))
    assert torch.equal(results[1][0], results[0][0]) and torch.equal(results[1][1], results[0][1])
    torch.testing.assert_close(results[1][2], results[0][2])


def test_embedding(seed: int) -> None:
    _embed(torch.float32, torch.device("cpu"))


@pytest.mark.gpu
def test_embedding_on_gpu(seed: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        _embed(dtype, torch.device("cuda"))

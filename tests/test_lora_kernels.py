"""Shrink and expand against plain sums in fp64, over odd shapes, mixed batches and dtypes."""
from __future__ import annotations

import random

import pytest
import torch

from lora_bench.kernels.lora import ExpandSlice, LoraLinear, LoraStep, lora_expand_, lora_shrink


def _expected_shrink(x: torch.Tensor, a: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (x.double() @ a.double().T) * weights.double()


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("rows", [1, 5, 24])
@pytest.mark.parametrize("shared", [False, True])
def test_shrink_weighs_every_row(seed: int, tokens: int, rows: int, shared: bool) -> None:
    x, a = torch.randn(tokens, 19), torch.randn(rows, 19)
    weights = torch.randn(tokens, 1 if shared else rows)
    torch.testing.assert_close(lora_shrink(x, a, weights).double(), _expected_shrink(x, a, weights), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shrink_keeps_the_dtype_of_its_input(seed: int, dtype: torch.dtype) -> None:
    x, a, weights = torch.randn(5, 32, dtype=dtype), torch.randn(8, 32, dtype=dtype), torch.randn(5, 8)
    h = lora_shrink(x, a, weights)
    assert h.dtype == dtype
    torch.testing.assert_close(h.double(), _expected_shrink(x, a, weights), rtol=0.03, atol=0.1)


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_expand_adds_each_slice_to_its_outputs(seed: int, tokens: int) -> None:
    y, h = torch.randn(tokens, 30), torch.randn(tokens, 9)
    slices = (ExpandSlice(0, 4, 0, 11, torch.randn(4, 11)), ExpandSlice(4, 9, 17, 30, torch.randn(5, 13)))
    expected = y.double().clone()
    for part in slices:
        expected[:, part.out_start:part.out_end] += h[:, part.row_start:part.row_end].double() @ part.b.double()
    untouched = y[:, 11:17].clone()
    lora_expand_(y, h, slices)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(y[:, 11:17], untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_an_adapter_stay_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    tokens = random.Random(seed).randrange(2, 40)
    x, a, b = torch.randn(tokens, 24, dtype=dtype), torch.randn(6, 24, dtype=dtype), torch.randn(6, 16, dtype=dtype)
    weights = torch.randn(tokens, 6)
    off = torch.arange(tokens) % 2 == 0
    weights[off] = 0
    y = torch.randn(tokens, 16, dtype=dtype)
    before = y.clone()
    lora_expand_(y, lora_shrink(x, a, weights), (ExpandSlice(0, 6, 0, 16, b),))
    assert torch.equal(y[off], before[off])
    assert not torch.equal(y[~off], before[~off])


def test_step_spreads_adapter_weights_over_rank_rows(seed: int) -> None:
    columns = (torch.tensor([0, 0, 1, 0, 1]), torch.tensor([1, 1]))
    step = LoraStep(torch.tensor([[2.0, -1.0], [0.0, 3.0]]), columns)
    first, second = (LoraLinear(torch.empty(0), (), layout) for layout in (0, 1))
    assert step.row_weights(first).tolist() == [[2, 2, -1, 2, -1], [0, 0, 3, 0, 3]]
    assert step.row_weights(second).tolist() == [[-1, -1], [3, 3]]
    assert step.row_weights(first) is step.row_weights(first)

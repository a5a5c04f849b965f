"""RMSNorm against plain fp64 arithmetic, from rows of zeros to large ones."""
from __future__ import annotations

import pytest
import torch

from lora_bench.kernels.norm import RmsNorm, rms_norm


@pytest.mark.parametrize("size", [1, 6, 576, 1000])
@pytest.mark.parametrize("magnitude", [0.0, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_match_plain_arithmetic(size: int, magnitude: float, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(5, size) * magnitude).to(dtype), torch.randn(size).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2e-2}
    for got in (rms_norm(x, weight, 1e-5), RmsNorm(weight, 1e-5)(x)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_weight_is_not_rounded(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 40).to(dtype), 1 + torch.randn(40) * 1e-3
    wide = x.double()
    expected = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()).to(dtype)
    got = RmsNorm(weight, 1e-5, dtype)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=2e-6 if dtype == torch.float32 else 0.0, rtol=1e-5 if dtype == torch.float32 else 0.004)

"""What programs of one launch hand to each other is right whatever order they run in, and however late one sees what another stored."""
from __future__ import annotations

import pytest
import torch
from interleaved import interleaved
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels.handover import gathered, put
from lora_bench.kernels.triton_compat import tl, triton


def test_interpreted() -> None:
    run_interpreted(__file__)


@triton.jit
def _sums(places, values, out, COUNT: tl.constexpr, WAIT: tl.constexpr):
    """out = the sum of COUNT rows of values, one of each program, by way of `places`."""
    program = tl.program_id(0)
    n = tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
    own = tl.load(values + program * 32 + n)
    if program < COUNT - 1:
        put(places + program * 32 + n, own)
    elif WAIT:
        tl.store(out + n, gathered(places + n, own, COUNT - 1, 32))
    else:
        for part in tl.static_range(COUNT - 1):
            own += (~tl.load(places + part * 32 + n)).to(tl.float32, bitcast=True)
        tl.store(out + n, own)


@interpreted
@pytest.mark.parametrize("count", [2, 8])
def test_gathered(count: int, seed: int) -> None:
    places, values = torch.zeros(count * 32, dtype=torch.int32), torch.randn(count, 32)
    values[0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.finfo(torch.float32).tiny / 2])
    for resident in (1, 3, 99):
        out = torch.full((32,), torch.nan)
        with interleaved(seed, resident):
            _sums[(count,)](places, values, out, count, True)
        total = values[0].clone()
        for value in values[1:]:
            total += value
        assert torch.equal(out, total) and not places.any()


@interpreted
def test_any_nan_comes(seed: int) -> None:
    """The one whose inverse means that nothing has come too."""
    values = torch.full((2, 32), -1, dtype=torch.int32).view(torch.float32)
    out, places = torch.zeros(32), torch.zeros(64, dtype=torch.int32)
    with interleaved(seed, 2):
        _sums[(2,)](places, values, out, 2, True)
    assert out.isnan().all() and not places.any()


@interpreted
def test_without_waiting_it_is_wrong(seed: int) -> None:
    """So the tests above could fail."""
    values, wrong = torch.randn(9, 32), 0
    for turn in range(10):
        out = torch.full((32,), torch.nan)
        with interleaved(seed + turn, 9):
            _sums[(9,)](torch.zeros(9 * 32, dtype=torch.int32), values, out, 9, False)
        wrong += not torch.allclose(out, values.sum(0), atol=1e-5)
    assert wrong > 5

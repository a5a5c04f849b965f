"""Times of the ops of a step from the stamps of their beginnings."""
from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lora_bench.kernels.stamps import Stamps

CUDA = pytest.mark.gpu


def test_without_a_device_clock_nothing_is_timed() -> None:
    stamps = Stamps(torch.zeros(4, dtype=torch.int64))
    stamps.begin()
    stamps.mark("a")
    assert not stamps.live and stamps.at("b") is None and stamps.sums(np.zeros(4, np.int64), ("a", "b")).tolist() == [0, 0]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA)])
def test_each_op_lasts_until_the_next_stamp(device: str, seed: int) -> None:
    """In whatever order ops come; a second pass asks for the same places."""
    ops = [random.choice("abc") for _ in range(30)]
    on_device = torch.zeros(40, dtype=torch.int64, device=device)
    stamps = Stamps(on_device)
    for _ in range(2):
        stamps.begin()
        for op in ops:
            stamps.mark(op)
        stamps.mark("end")
    written = on_device.cpu().numpy()
    assert (np.diff(written[:31]) >= 0).all() and written[0] > 0
    times = np.cumsum(np.random.default_rng(seed).integers(1, 10**6, 40)) + (1 << 60)
    expected = {op: sum(int(times[i + 1] - times[i]) for i, one in enumerate(ops) if one == op) / 1e6 for op in "abcd"}
    assert dict(zip("abcd", stamps.sums(times, tuple("abcd")), strict=True)) == pytest.approx(expected)

"""Lap times: every moment belongs to one op, and the parts are the whole."""
from __future__ import annotations

import time

import pytest
import torch

from lora_bench.kernels.timing import LapTimer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_laps_own_the_time_since_the_one_before(device: str) -> None:
    timer = LapTimer(("sleep", "work", "rest"), torch.device(device))
    for _ in range(2):
        began = time.perf_counter()
        timer.start()
        time.sleep(0.02)
        timer.lap("sleep")
        torch.ones(200, 200, device=device) @ torch.ones(200, 200, device=device)
        timer.lap("work")
        time.sleep(0.01)
        timer.lap("sleep")
        wall = (time.perf_counter() - began) * 1e3
        ms, parts = timer.finish()
        assert list(parts) == ["sleep", "work", "rest"] and parts["rest"] == 0 < parts["work"]
        assert ms == pytest.approx(sum(parts.values())) and ms <= (time.perf_counter() - began) * 1e3
        if device == "cpu":
            assert 30 <= parts["sleep"] <= ms <= wall

"""How often a step is run without its adapters, and what that says of the steps between."""
from __future__ import annotations

import random

import numpy as np
import pytest

from lora_bench.engine.adapter_share import EVERY, STEADY, AdapterShare


def test_looks_are_rare_and_of_adapters_that_stay(seed: int) -> None:
    share, draw = AdapterShare(3), random.Random(seed)
    key, since_change, looks = 0, 0, []
    for step in range(20_000):
        if draw.random() < 0.02:
            key, since_change = key + 1, 0
        if share.due(key):
            assert since_change >= STEADY
            looks.append(step)
        since_change += 1
    assert len(looks) > 100 and min(np.diff(looks)) >= EVERY


def test_adapters_and_base_make_up_the_whole() -> None:
    share = AdapterShare(3)
    whole = np.array([4.0, 0.0, 2.0])
    assert share.split(whole)[1] == 0
    share.measured(np.array([3.0, 0.0, 2.5]), whole)  # an op may be measured longer without adapters: it is all base then
    base, adapters = share.split(2 * whole)
    assert base.tolist() == [6.0, 0.0, 4.0] and adapters == pytest.approx(2.0)

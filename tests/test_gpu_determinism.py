"""A request draws the same tokens on a CUDA device whatever runs beside it, and whatever was found or computed again."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from engine_bench import ONE, THREE, TWO, Bench, random_ids

from lora_bench.engine.protocol import Mix, RequestPreempted, TokenIds
from lora_bench.kernels.sampling import gumbel

pytestmark = pytest.mark.gpu

REQUESTS, TOKENS = 24, 40
ROUNDING = {"fp32": 1e-5, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""relative, of a logit: what the order of a sum may change"""


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    mix: Mix
    temperature: float
    seed: int


@pytest.mark.calm
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_tokens_are_the_same_alone_together_staggered_and_preempted(make: Callable[..., Bench], dtype: str, seed: int) -> None:
    """Equal, or parted where the two best were as close as rounding; how many are equal is printed."""
    draw = random.Random(seed)
    shared = random_ids(40, seed)
    mixes: Sequence[Mix] = ((), ONE, TWO, THREE, (*TWO, *ONE))
    asked = [Asked((*shared[: draw.choice((0, 16, 40))], *random_ids(draw.randint(1, 30), seed + number)), draw.choice(mixes),
                   draw.choice((0.0, 0.8)), number) for number in range(REQUESTS)]
    alone = make(blocks=256, device="cuda", dtype=dtype)
    for number, one in enumerate(asked):
        alone.engine.clear_cache()
        _submit(alone, number, one)
        alone.run()
    ways = {"together": (256, 0), "staggered": (256, 3), "preempted": (24, 2)}
    for way, (blocks, pause) in ways.items():
        bench = make(blocks=blocks, device="cuda", dtype=dtype)
        for number, one in enumerate(asked):
            _submit(bench, number, one)
            bench.run(draw.randint(0, pause))
        bench.run()
        assert bool(bench.of(RequestPreempted)) == (way == "preempted")
        parted = [number for number in range(REQUESTS) if bench.ids(number) != alone.ids(number)]
        print(f"{dtype} {way}: {REQUESTS - len(parted)} of {REQUESTS} equal")
        for number in parted:
            assert _as_good(alone, asked[number], alone.ids(number), bench.ids(number), ROUNDING[dtype]), (way, number)


def _submit(bench: Bench, number: int, one: Asked) -> None:
    bench.submit(number, TokenIds(one.prompt), one.mix, max_tokens=TOKENS, temperature=one.temperature, seed=one.seed)


def _as_good(bench: Bench, one: Asked, ids: Sequence[int], other: Sequence[int], rounding: float) -> bool:
    """Whether what was drawn first otherwise was a choice between two that rounding may swap."""
    at = next(i for i, (a, b) in enumerate(zip(ids, other, strict=True)) if a != b)
    logits = bench.engine.logits([*one.prompt, *ids[:at]], one.mix).double().cpu()
    room = 4 * rounding * float(logits.abs().max())
    if one.temperature:
        logits = logits / one.temperature + gumbel(one.seed, len(one.prompt) + at, logits.shape[-1])
        room /= one.temperature
    return abs(float(logits[ids[at]] - logits[other[at]])) <= room

"""Decode steps under CUDA graphs: the same replies as without, alone and in company, and nothing captured twice."""
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_bench import ONE, THREE, TWO, Bench, random_ids
from gguf_file import write_gguf

from lora_bench.engine.device_graphs import DecodeGraphs, Kind, NoGraph
from lora_bench.engine.device_step import DeviceStep
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import (
    GRAPH_OPS,
    AdapterUse,
    Event,
    Generate,
    GraphCaptured,
    GraphCapturing,
    LoadModel,
    Mix,
    RequestFinished,
    Sampling,
    StepFinished,
    TokenIds,
)

pytestmark = pytest.mark.gpu

MIXES: tuple[Mix, ...] = ((), ONE, TWO, (*THREE, *ONE), (AdapterUse("two", -1.0), AdapterUse("one", 0.0)), (*TWO, *THREE, *ONE))


@pytest.mark.calm
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_replies_under_graphs_are_those_without(make: Callable[..., Bench], dtype: str, seed: int) -> None:
    """Those of the CPU in fp32, or parted where rounding to the dtype decides; how many are equal is printed."""
    cuda, cpu = make(device="cuda", dtype=dtype), make()
    draw, equal = random.Random(seed), 0
    for number in range(20):
        prompt, mix = random_ids(draw.randint(3, 60), seed + number), MIXES[number % len(MIXES)]
        for bench in (cuda, cpu):
            bench.submit(number, TokenIds(prompt), mix, max_tokens=30, temperature=0.8 if number % 5 == 4 else 0.0, seed=number)
        cuda.run(draw.randint(0, 4))
    cuda.run()
    cpu.run()
    for number in range(20):
        equal += cuda.ids(number) == cpu.ids(number)
    paths = [step.path for step in cuda.of(StepFinished)]
    print(f"{dtype}: {equal} of 20 replies equal; {paths.count('graph')} of {len(paths)} steps under graphs")
    print({path for path in paths if path != "graph"})
    assert not [event.problem for event in cuda.of(GraphCaptured) if event.problem]
    assert paths.count("graph") > len(paths) / 2
    assert equal >= (20 if dtype == "fp32" else 5)


@pytest.mark.calm
def test_nothing_is_captured_twice_and_times_sum_up(make: Callable[..., Bench], seed: int) -> None:
    bench = make(device="cuda", dtype="bf16")
    for number in range(8):
        bench.submit(number, TokenIds(random_ids(20, seed + number)), MIXES[number % len(MIXES)], max_tokens=40 + number)
    for turn in range(30):
        bench.run(2)
        bench.engine.set_mix(MIXES[turn % len(MIXES)], [turn % 8])
    bench.run()
    graphs = [(event.rows, event.adapters, event.more) for event in bench.of(GraphCapturing)]
    assert len(graphs) == len(set(graphs)) == len(bench.of(GraphCaptured)) and (8, True, "") in graphs
    steps = [step for step in bench.of(StepFinished) if step.path == "graph"]
    for step in steps:
        assert set(step.ms_by_op) == set(GRAPH_OPS) and all(ms >= 0 for ms in step.ms_by_op.values()), step
        assert sum(step.ms_by_op.values()) == pytest.approx(step.ms)
    print(steps[-20].ms, steps[-20].ms_by_op)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_packed_bases_draw_under_graphs_what_dense_ones_would(tmp_path: Path, kind: str, seed: int) -> None:
    """Each token is the best of the dense base on the CPU, or close to it by what 16 bits round."""
    base = write_gguf(tmp_path / "m.gguf", {"v_proj": "Q6_K", "": kind}, np.random.default_rng(seed), spread=0.05)
    events: list[Event] = []
    cuda, cpu = Engine(events.append), Engine(lambda event: None)
    cuda.load_model(LoadModel(str(base), device="cuda", dtype="bf16", weights="packed"))
    cpu.load_model(LoadModel(str(base), device="cpu", weights="dense"))
    prompts = [random_ids(10 + number, seed + number) for number in range(3)]
    for number, prompt in enumerate(prompts):
        cuda.submit(Generate(number, TokenIds(prompt), (), Sampling(max_tokens=20)))
    while cuda.step():
        pass
    assert [event.path for event in events if isinstance(event, StepFinished)].count("graph") >= 18
    for event in events:
        if isinstance(event, RequestFinished):
            for place, token in enumerate(event.ids):
                logits = cpu.logits((*prompts[event.request_id], *event.ids[:place]), ())
                assert logits.max() - logits[token] < 0.15 * logits.std(), (event.request_id, place)


@pytest.mark.calm
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_reply_does_not_depend_on_what_runs_beside_it(make: Callable[..., Bench], dtype: str, seed: int) -> None:
    """Its prompt is computed alone both times; the tokens are equal, near ties and all, while rows come, go and change their adapters."""
    bench, draw = make(blocks=400, device="cuda", dtype=dtype), random.Random(seed)
    for number, mix in enumerate(MIXES):
        asked = TokenIds(random_ids(25, seed + number))
        settings = {"max_tokens": 60, "temperature": draw.choice((0.0, 1.0)), "seed": number}
        bench.engine.clear_cache()
        alone = bench.reply(mix, prompt=asked, **settings)
        bench.engine.clear_cache()
        bench.submit(1, asked, mix, **settings)
        bench.run(2)
        for other in range(2, 14):
            prompt = TokenIds(random_ids(draw.randint(2, 50), seed * 31 + other))
            bench.submit(other, prompt, draw.choice(MIXES), max_tokens=draw.randint(2, 40))
            bench.run(draw.randint(0, 3))
        bench.run()
        assert bench.ids(1) == alone, mix
        bench.events.clear()


def test_what_cannot_be_captured_is_said_once_and_the_device_goes_on() -> None:
    """Captures, random numbers, memory that several streams used, and the stream of the thread are as they were."""
    events: list[Event] = []
    graphs, calls = DecodeGraphs(torch.device("cuda"), events.append), []
    x, stream = torch.ones(3, device="cuda"), torch.cuda.current_stream()

    def step() -> None:
        calls.append((x * 2).sum().item())  # waits for the device

    for _ in range(3):
        with pytest.raises(NoGraph, match="the decode step of 2 rows could not be captured") as failed:
            graphs.run(Kind(2, True), step)
    assert "previous error" not in str(failed.value), "the cause is said, not what it led to"
    assert len(calls) == 1, "the first call, without a graph"
    assert [type(event) for event in events] == [GraphCapturing, GraphCaptured] and "captured" in events[1].problem
    assert torch.cuda.current_stream() == stream and (x + 1).sum().item() == 6
    assert torch.rand(100, device="cuda").unique().numel() > 90
    for turn in range(3):
        graphs.run(Kind(4, True), lambda: x.mul_(2))
        assert x.tolist() == [2.0 ** (turn + 2)] * 3, "twice the first time: to compile, and the graph"


@pytest.mark.calm
def test_an_engine_goes_on_when_a_kind_of_step_cannot_be_captured(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, seed: int,
) -> None:
    """Replies with drawn tokens run eagerly then, to the same tokens; those of other kinds under graphs."""
    bench, calls = make(device="cuda"), 0
    settings = {"max_tokens": 12, "temperature": 0.9, "seed": 3}
    expected = [bench.reply(mix, **settings) for mix in ((), ONE)]
    broken, step = make(device="cuda"), DeviceStep._step

    def fails(self: DeviceStep, kind: Kind) -> None:
        nonlocal calls
        step(self, kind)
        calls += kind.adapters
        if kind.adapters and calls == 2:
            torch.cuda.synchronize()

    monkeypatch.setattr(DeviceStep, "_step", fails)
    for mix, ids in zip(((), ONE), expected, strict=True):
        broken.submit(1, mix=mix, **settings)
        broken.run()
        assert broken.ids(1) == ids
        paths = {event.path for event in broken.of(StepFinished)}
        assert any("could not be captured" in path for path in paths) == (mix == ONE) and ("graph" in paths) == (mix == ())
        broken.events.clear()
    assert calls == 2

"""Traces of a step: what ran in it, by name, and that replies are what they would have been."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from engine_bench import ONE, TWO, Bench

from lora_bench.engine import traces
from lora_bench.engine.device_step import DeviceStep
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import GraphCaptured, LoadModel, StepFinished, StepTraced, TraceFailed
from lora_bench.kernels import recording
from lora_bench.kernels.recording import Ran, Recorder, times
from lora_bench.kernels.stamps import Stamps


def _by_moments(ran: Sequence[Ran]) -> tuple[dict[str, tuple[int, int]], int]:
    """(own, beside) by name, and the busy moments: one nanosecond after the other, the innermost of each lane."""
    found, busy = {one.name: (0, 0) for one in ran}, 0
    for at in range(max(one.end for one in ran)):
        running = {}
        for one in sorted((one for one in ran if one.begin <= at < one.end), key=lambda one: (one.begin, -one.end)):
            running[one.lane] = one.name
        busy += bool(running)
        for name in running.values():
            own, beside = found[name]
            found[name] = own + 1, beside + (len(running) > 1)
    return found, busy


def _nested(lane: int, begin: int, end: int) -> list[Ran]:
    """An op with others in it, and in these."""
    ran, at = [Ran(random.choice("abcde"), lane, begin, end)], begin
    while end - at > 4 and random.random() < 0.8:
        first = random.randint(at, end - 2)
        last = random.randint(first + 1, end)
        ran += _nested(lane, first, last) if last - first < end - begin else []
        at = last
    return ran


def test_times_are_those_of_every_moment(seed: int) -> None:
    random.seed(seed)
    for _ in range(30):
        ran = []
        for lane in range(random.randint(1, 3)):
            at = random.randint(0, 20)
            for _ in range(random.randint(1, 6)):
                end = at + random.randint(1, 30)
                ran += _nested(lane, at, end)
                at = end + random.choice((0, 0, 5))
        random.shuffle(ran)
        got, (expected, busy) = times(ran), _by_moments(ran)
        assert {one.name: (one.own, one.beside) for one in got.by_name} == expected and got.busy == busy
        assert {one.name: one.calls for one in got.by_name} == {name: sum(one.name == name for one in ran) for name in expected}
        assert [one.own for one in got.by_name] == sorted((one.own for one in got.by_name), reverse=True)
    assert times([]).by_name == [] and times([]).busy == 0


def test_kernels_of_one_stream_that_overlap_count_each_moment_once() -> None:
    """The next one may begin while the one before drains."""
    found = times([Ran("first", 7, 0, 100), Ran("second", 7, 70, 200), Ran("third", 7, 170, 290)])
    assert {one.name: one.own for one in found.by_name} == {"first": 100, "second": 100, "third": 90}
    assert found.busy == 290 and not any(one.beside for one in found.by_name)


def test_ops_are_recorded_with_the_time_that_is_their_own() -> None:
    recorder, x = Recorder(torch.device("cpu")), torch.randn(400, 400)
    recorder.start()
    torch.nn.functional.linear(x, x)
    torch.nn.functional.linear(x, x)
    by_name = {one.name: one for one in times(recorder.stop()).by_name}
    assert by_name["aten::linear"].calls == 2 and "aten::mm" in by_name
    assert by_name["aten::mm"].own > by_name["aten::linear"].own > 0


@pytest.mark.calm
def test_the_next_step_is_traced_and_the_reply_is_the_same(make: Callable[..., Bench]) -> None:
    bench = make()
    expected = bench.reply(ONE)
    bench.submit(1, mix=ONE)
    bench.run(3)
    bench.engine.trace()
    bench.engine.trace()
    bench.run(1)
    (traced,), steps = bench.of(StepTraced), bench.of(StepFinished)
    assert traced.step == steps[-1] and bench.events.index(traced) == bench.events.index(steps[-1]) + 1
    assert traced.device == "cpu" and traced.step.decode_tokens == 1
    assert 0 < sum(op.us for op in traced.ops) == pytest.approx(traced.busy_ms * 1e3) and traced.busy_ms <= traced.ms and traced.cost_ms > 0
    assert {"aten::mm", "aten::addmm"} & {op.name for op in traced.ops} and all(op.calls > 0 and not op.beside_us for op in traced.ops)
    assert [op.us for op in traced.ops] == sorted((op.us for op in traced.ops), reverse=True)
    bench.run()
    assert bench.ids(1) == expected and len(bench.of(StepTraced)) == 1


def test_without_a_step_the_trace_waits_for_one(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.engine.trace()
    bench.run()
    assert not bench.of(StepTraced)
    bench.submit(1)
    bench.run(1)
    (traced,) = bench.of(StepTraced)
    assert traced.step.prefill_tokens == 7


def test_many_names_are_told_as_one_line_and_long_ones_are_cut(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_OPS", 3)
    monkeypatch.setattr(traces, "MOST_NAME", 14)
    bench = make()
    bench.engine.trace()
    bench.submit(1)
    bench.run(1)
    (traced,) = bench.of(StepTraced)
    assert len(traced.ops) == 4 and traced.ops[-1].name.endswith("other names") and all(len(op.name) <= 14 for op in traced.ops)
    assert sum(op.us for op in traced.ops) == pytest.approx(traced.busy_ms * 1e3)


def test_a_trace_that_cannot_be_made_says_why_and_the_step_is_made(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    expected = bench.reply()

    def held(*_: object) -> None:
        raise RuntimeError("it is in use")

    class Nothing(Recorder):
        def stop(self) -> list[Ran]:
            super().stop()
            return []

    class BreaksOff(Recorder):
        def stop(self) -> list[Ran]:
            super().stop()
            raise RuntimeError("the buffer is full")

    for kind, words in ((type("Held", (Recorder,), {"start": held}), "could not be started: RuntimeError: it is in use"),
                        (Nothing, "recorded nothing"), (BreaksOff, "broke off: RuntimeError: the buffer is full")):
        monkeypatch.setattr(traces, "Recorder", kind)
        bench.engine.trace()
        assert bench.reply() == expected
        bench.engine.trace()
        bench.submit(1)
        bench.run()
        (failed,) = bench.of(TraceFailed)
        assert words in failed.message and not bench.of(StepTraced)
        bench.events.clear()


def test_a_step_that_fails_and_a_base_that_goes_answer_the_trace(
    base: Path, make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make()
    bench.submit(1)
    bench.engine.trace()
    monkeypatch.setattr(bench.engine.model.runner, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.engine.step()
    bench.engine.drop_requests("it failed")
    assert [event.message for event in bench.of(TraceFailed)] == ["the step failed: ZeroDivisionError: division by zero"]
    bench.engine.trace()
    bench.engine.load_model(LoadModel(str(base), device="cpu"))
    assert bench.of(TraceFailed)[-1].message.startswith("the base was unloaded")
    bench.submit(2)
    bench.run()
    assert not bench.of(StepTraced)


def test_without_a_base_there_is_nothing_to_trace() -> None:
    with pytest.raises(ValueError, match="no base is loaded"):
        Engine(lambda event: None).trace()


@pytest.fixture
def on_device(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A reply with an adapter runs in steps as on a device whose stamps are live."""
    monkeypatch.setattr(Stamps, "live", property(lambda self: True))
    bench = make(pages=12)
    bench.engine.model.runner.use_device_step(8, bench.events.append)
    bench.submit(1, mix=ONE, max_tokens=60)
    bench.run(2)
    return bench


def test_a_traced_step_is_not_run_without_its_adapters_too(on_device: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    step, launched = on_device.engine.model.runner._device_step, []
    launch = step._launch
    monkeypatch.setattr(step, "_launch", lambda kind: launched.append(kind) or launch(kind))
    for _ in range(15):
        on_device.engine.trace()
        on_device.run(1)
    on_device.engine.snapshot()
    assert len(launched) == 15 == len(on_device.of(StepTraced))
    on_device.run(1)
    assert len(launched) == 17, "it was due for long"


def test_a_step_that_captures_a_graph_is_not_the_one_that_is_traced(on_device: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = iter((0, 1, 1, 1))
    monkeypatch.setattr(DeviceStep, "graphs", property(lambda self: next(captured)))
    before = len(on_device.of(StepFinished))
    on_device.engine.trace()
    on_device.run(2)
    on_device.engine.snapshot()
    (traced,), steps = on_device.of(StepTraced), on_device.of(StepFinished)
    assert traced.step == steps[-1] and next(captured, None) is None and len(steps) - before >= 2


@pytest.mark.gpu
@pytest.mark.calm
def test_kernels_inside_a_graph_are_traced_by_name(make: Callable[..., Bench]) -> None:
    """Again and again, with graphs that were captured before and after the first trace."""
    bench = make(device="cuda", dtype="bf16")
    expected = {}
    for mix in ((), ONE, TWO):
        bench.engine.clear_cache()  # a prompt that is found is computed in other steps, whose sums round otherwise
        expected[mix] = bench.reply(mix)
    for number, mix in enumerate(expected):
        bench.engine.clear_cache()
        bench.submit(number, mix=mix)
        bench.run(4)
        bench.engine.trace()
        bench.run()
        traced = bench.of(StepTraced)[-1]
        print(f"{traced.ms:.3f} ms, busy {traced.busy_ms:.3f}, cost {traced.cost_ms:.1f}")
        for op in traced.ops:
            print(f"  {op.calls:4} {op.us:9.1f} {op.beside_us:8.1f} {op.name[:90]}")
        assert len(bench.of(StepTraced)) == number + 1 and not bench.of(TraceFailed)
        assert traced.device == "cuda" and traced.step.path == "graph" and bench.ids(number) == expected[mix]
        kernels = {op.name for op in traced.ops}
        assert {name for name in kernels if "decode_attention" in name} and 0 < traced.busy_ms < traced.ms
        assert all(op.calls % 2 == 0 for op in traced.ops if "decode_attention" in op.name), "it has two layers"
    bench.engine.clear_cache()
    bench.engine.trace()
    bench.submit(9, mix=ONE)
    bench.run(1)
    bench.engine.snapshot()
    prompt = bench.of(StepTraced)[-1]
    assert prompt.step.prefill_tokens == 7 and not any("decode_attention" in op.name for op in prompt.ops)
    bench.run()
    assert recording.os.environ["TEARDOWN_CUPTI"] == "0" and bench.ids(9) == expected[ONE]
    del bench.events[:]
    bench.engine.clear_cache()
    for number in (10, 11):
        bench.submit(number, mix=ONE)
    bench.engine.trace()
    bench.run(1)
    bench.engine.trace()
    bench.run()
    ((captured,), (_, traced)) = bench.of(GraphCaptured), bench.of(StepTraced)
    assert captured.rows == 2 and not captured.problem and not bench.of(TraceFailed)
    assert traced.step.path == "graph" and traced.step.decode_tokens == 2 and traced.step == bench.of(StepFinished)[2]

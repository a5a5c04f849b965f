"""The trace of a step on the screen: asked for by a key, shown as a table, refused in words."""
from __future__ import annotations

from bench_pilot import bench_app, running, say, screen_text, settled, wait_until
from fake_engine import step, traced
from textual.pilot import Pilot

from lora_bench.engine import protocol as p
from lora_bench.workbench.app import BenchApp
from lora_bench.workbench.screens.engine import EngineScreen
from lora_bench.workbench.screens.trace import TraceScreen


async def _to_the_engine(pilot: Pilot) -> None:
    await pilot.press("f4")
    await wait_until(pilot, lambda: isinstance(pilot.app.screen, EngineScreen))


async def _trace(pilot: Pilot) -> None:
    await pilot.press("t")
    await wait_until(pilot, lambda: isinstance(pilot.app.screen, TraceScreen))
    await settled(pilot)


def _lines(app: BenchApp) -> list[str]:
    return [" ".join(line.split()) for line in screen_text(app).splitlines()]


async def test_a_key_traces_the_next_step_and_its_table_has_the_whole_step() -> None:
    app = bench_app("a b c")
    async with running(app, 80, 24) as pilot:
        await say(pilot, "x")
        await wait_until(pilot, lambda: not app.state.running)
        await _to_the_engine(pilot)
        assert any("t Trace" in line for line in _lines(app)), "the footer says the key"
        await _trace(pilot)
        assert len(app.engine.of(p.TraceStep)) == 1
        lines = _lines(app)
        assert "TRACE OF STEP 12 0+1 tok · 1 seq · 2 adapters" in lines
        assert "48.00 ms under the profiler, which slows it; steps take 41.00 ms (p50)" in lines
        assert "38.23 ms 80% in the ops below" in lines and "9.77 ms 20% in none of them: Python between ops" in lines
        assert "131.40 ms more to start and read the profiler; replies stood still" in lines
        rows = [lines.index(row) for row in ("210 30,215.1 62.9% aten::addmm", "30 8,000.0 16.7% aten::copy_", "4 12.5 0.0% aten::softmax")]
        assert rows == sorted(rows) and "beside" not in screen_text(app)
        await pilot.press("t")
        await settled(pilot)
        assert len(app.engine.of(p.TraceStep)) == 2
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, EngineScreen))
        await settled(pilot)
        assert "step 12 was traced: 3 names, 48.0 ms; replies stood still for 131 ms more" in " ".join(
            event.text for event in app.state.events)
        await pilot.press("T")
        await settled(pilot)
        assert "210 30,215.1 62.9% aten::addmm" in _lines(app) and len(app.engine.of(p.TraceStep)) == 2


async def test_what_a_device_ran_beside_something_else_is_told() -> None:
    app = bench_app()
    async with running(app, 120, 36) as pilot:
        app.engine.emit(step(1), traced("cuda"))
        await _to_the_engine(pilot)
        await pilot.press("T")
        await settled(pilot)
        assert "30 8,000.0 16.7% 120.5 ██ _decode_attention_kernel" in _lines(app)
        assert any(line.startswith("9.77 ms 20% nothing ran there") for line in _lines(app))


async def test_without_a_step_the_trace_waits_and_is_asked_for_once() -> None:
    app = bench_app(answers=False)
    async with running(app) as pilot:
        app.engine._do_LoadModel(p.LoadModel())
        await settled(pilot)
        await _to_the_engine(pilot)
        await _trace(pilot)
        assert "no step runs now: a trace is made of the next one" in screen_text(app)
        await pilot.press("t")
        app.engine.emit(app.engine.snapshot(running=(1,)))
        await settled(pilot)
        assert "the next step is traced" in screen_text(app) and len(app.engine.of(p.TraceStep)) == 1
        app.engine.emit(p.TraceFailed("the step failed: it is too large"))
        await settled(pilot)
        assert "✗ no trace: the step failed: it is too large" in screen_text(app)
        await pilot.press("t")
        app.engine.emit(traced())
        await settled(pilot)
        assert len(app.engine.of(p.TraceStep)) == 2 and "no trace" not in screen_text(app) and "aten::addmm" in screen_text(app)


async def test_without_a_model_or_an_engine_the_key_says_so() -> None:
    app = bench_app(answers=False)
    async with running(app) as pilot:
        await _to_the_engine(pilot)
        await _trace(pilot)
        assert "the model is not there yet: t traces a step of it once it is loaded" in screen_text(app)
        app.engine.emit(p.ModelFailed("it was cancelled", cancelled=True))
        await settled(pilot)
        await pilot.press("escape")
        await settled(pilot)
        assert "no model is loaded: a trace is made of a step of one" in screen_text(app)
        app.engine._do_LoadModel(p.LoadModel())
        await settled(pilot)
        assert "no model is loaded" not in screen_text(app) and not app.state.tracing
        await pilot.press("t")
        await settled(pilot)
        assert app.state.tracing
        app.engine.emit(p.EngineFailed("the engine process is gone"))
        await settled(pilot)
        await pilot.press("t")
        await settled(pilot)
        assert "the engine is gone: Ctrl+E starts it again" in screen_text(app)
        assert len(app.engine.of(p.TraceStep)) == 1 and not app.state.tracing


async def test_names_are_shown_as_text_and_cut_at_the_edge() -> None:
    app = bench_app()
    async with running(app, 60, 20) as pilot:
        ops = (p.TracedOp("\x1b]0;x\x07[red]void at::native::kernel<" + "w" * 300, 3, 5.0, 0.0), p.TracedOp("字" * 90, 1, 2.0, 0.0))
        app.engine.emit(traced(ops=ops))
        await _to_the_engine(pilot)
        await pilot.press("T")
        await settled(pilot)
        lines = screen_text(app).splitlines()
        assert any("␛]0;x␇[red]void" in line and line.rstrip().endswith("…") for line in lines) and "\x1b" not in screen_text(app)
        assert len(lines) == 20 and any("字字" in line for line in lines)


async def test_another_base_has_no_trace_yet() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.engine.emit(traced())
        await settled(pilot)
        app.engine._do_LoadModel(p.LoadModel())
        await _to_the_engine(pilot)
        await pilot.press("T")
        await settled(pilot)
        assert "no step was traced yet: t traces the next one" in screen_text(app)

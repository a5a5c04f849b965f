"""The main screen as a whole: its sizes, a load, the end of the engine."""
from __future__ import annotations

import random

from bench_pilot import bench_app, last_mix, running, say, screen_text, settled, uses, wait_until

from lora_bench.engine import protocol as p
from lora_bench.workbench.panels.engine import SlotsPanel
from lora_bench.workbench.widgets.prompt import Prompt


async def test_a_load_says_what_is_happening_before_the_engine_does() -> None:
    app = bench_app(answers=False)
    async with running(app) as pilot:
        await settled(pilot)
        shown = screen_text(app)
        assert "The engine is starting" in shown and "3 adapters to read" in shown and "Ctrl+O" not in shown
        app.engine.emit(p.ModelLoading("download", "x.whl", 31 << 20, 93 << 20))
        await settled(pilot)
        shown = screen_text(app)
        assert "33%" in shown and "31.0 MiB of 93.0 MiB" in shown and "Esc cancels" in shown


async def test_the_engine_dies_and_is_started_again_from_its_card() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "x")
        app.engine.emit(p.RequestStarted(1, 9), p.TextDelta(1, "half a", 2))
        app.engine.emit(p.EngineFailed("the engine process is gone: it was killed by signal 9, SIGKILL"))
        await settled(pilot)
        shown = screen_text(app)
        assert "engine gone" in shown and "half a" in shown and "SIGKILL" in shown and "Ctrl+E" in shown
        app.screen.query(".engine").last().focus()
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.state.engine == "idle" and not app.state.wanted)
        assert app.engine.starts == 2 and last_mix(app) == uses(("pirate", 0.75), ("json", 0.3))


async def test_a_load_that_fails_opens_the_load_screen() -> None:
    app = bench_app(answers=False)
    async with running(app) as pilot:
        app.engine.emit(p.ModelLoading("weights", "layers.0", 5, 10))
        await settled(pilot)
        assert "50%" in screen_text(app)
        await pilot.press("escape")
        assert app.engine.of(p.CancelLoad)
        app.engine.emit(p.ModelFailed("smol.gguf: the architecture is mamba, llama was expected"))
        await wait_until(pilot, lambda: type(app.screen).__name__ == "LoadScreen")
        await pilot.pause()
        assert "mamba" in screen_text(app)


async def test_letters_typed_while_the_screen_is_too_small_stand_in_the_prompt_later() -> None:
    app = bench_app()
    async with running(app, 20, 5) as pilot:
        await pilot.press("h", "i")
        await pilot.resize_terminal(100, 30)
        await settled(pilot)
        assert app.screen.query_one(Prompt).text == "hi"
        await pilot.press("g")
        assert app.screen.query_one(Prompt).text == "hig"


async def test_resizing_while_streaming(seed: int) -> None:
    app = bench_app()
    rng = random.Random(seed)
    async with running(app) as pilot:
        await say(pilot, "x")
        app.engine.emit(p.RequestStarted(1, 9))
        for count in range(8):
            app.engine.emit(p.TextDelta(1, rng.choice(["word ", "```\n", "| a | b |\n", "\n\n", "**x** "]), count))
            await pilot.resize_terminal(rng.randint(10, 200), rng.randint(4, 60))
            await app.show()
        await pilot.resize_terminal(19, 30)
        await pilot.pause()
        assert "terminal too" in screen_text(app)
        await pilot.resize_terminal(80, 24)
        await settled(pilot)
        assert "slots" in screen_text(app)


async def test_narrow_screens_lay_the_adapters_over_the_chat() -> None:
    app = bench_app()
    async with running(app, 50, 20) as pilot:
        assert "ADAPTERS" not in screen_text(app)
        await pilot.press("f9")
        await settled(pilot)
        assert "ADAPTERS" in screen_text(app)
        await pilot.press("f9")
        await settled(pilot)
        assert "ADAPTERS" not in screen_text(app)


async def test_a_wide_screen_after_a_narrow_one_has_all_panels_again() -> None:
    app = bench_app()
    async with running(app, 50, 20) as pilot:
        await pilot.press("tab")
        await settled(pilot)
        assert "ADAPTERS" in screen_text(app)
        await pilot.resize_terminal(120, 36)
        await settled(pilot)
        assert "ADAPTERS" in screen_text(app) and "SLOTS" in screen_text(app)
        await pilot.press("f9")
        await settled(pilot)
        assert "ADAPTERS" not in screen_text(app) and "SLOTS" not in screen_text(app)


async def test_pages_of_a_device_are_shown_with_what_each_slot_has_of_them() -> None:
    app = bench_app()
    async with running(app, 140, 40) as pilot:
        slots = (p.SlotView(0, "pirate", 16, 84 << 20, users=1, pages=4), p.SlotView(1))
        kinds = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
        pages = tuple(p.PagesView(kind, int(kind != "lm_head"), 32, 17 << 20) for kind in kinds)
        app.engine.emit(app.engine.snapshot(slots=slots, pages=pages))
        await settled(pilot)
        shown = " ".join(str(app.screen.query_one(SlotsPanel).render()).split())
        assert "84.0 MiB 4p in use" in shown
        assert "pages (p) qkv 1 · o 1 · gate_up 1 · down 1 · head 0 of 32 each · 2.7 GiB in all" in shown

"""Details of an adapter and its check, under events of a scripted engine."""
from __future__ import annotations

import msgspec
from bench_pilot import bench_app, running, screen_text, settled, wait_until
from fake_engine import report

from lora_bench.engine import protocol as p
from lora_bench.workbench.screens.details import DetailsScreen
from lora_bench.workbench.screens.engine import EngineScreen
from lora_bench.workbench.widgets.prompt import Prompt


async def test_details_check_the_adapter_once_and_an_effect_run_is_kept() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "i")
        await wait_until(pilot, lambda: "FIELDS OF ITS CONFIG" in screen_text(app))
        assert app.engine.of(p.CheckAdapter) == [p.CheckAdapter("pirate", False)]
        shown = screen_text(app)
        for part in ("pirate: usable, 1 warning", "! it was trained on another base", "‖ΔW‖ / ‖W‖", "layer 29", "not run yet: F5",
                     "✓ r = 16"):
            assert part in shown, part
        await pilot.press("f5")
        await wait_until(pilot, lambda: "22.8% of 162 likeliest tokens change" in screen_text(app))
        assert "'I' → 'Arr'" in screen_text(app)
        await pilot.press("escape")
        await settled(pilot)
        assert "23% of" in screen_text(app) and any("pirate checked: usable, 1 warning" in entry.text for entry in app.state.events)
        await pilot.press("i")
        await settled(pilot)
        assert len(app.engine.of(p.CheckAdapter)) == 2 and "'I' → 'Arr'" in screen_text(app)


async def test_a_screen_that_is_not_all_there_waits_for_its_widgets() -> None:
    app = bench_app()
    async with running(app):
        await DetailsScreen(app.control, "pirate").show()
        await EngineScreen(app.control).show()


async def test_a_check_that_waits_fails_or_is_of_old_content_says_so() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.engine._do_CheckAdapter = lambda command: None
        await pilot.press("tab", "f5")
        await settled(pilot)
        assert app.engine.of(p.CheckAdapter) == [p.CheckAdapter("pirate", True)] and "being checked: waits for its turn" in screen_text(app)
        app.engine.emit(p.CheckProgress("pirate", "compares: chat"))
        await settled(pilot)
        assert "being checked: compares: chat" in screen_text(app)
        app.engine.emit(p.CheckFailed("pirate", "memory ran out: [/x] \x1b]2;owned"))
        await settled(pilot)
        assert "✗ memory ran out: [/x] ␛]2;owned" in screen_text(app) and len(app.engine.of(p.CheckAdapter)) == 1
        app.engine.emit(p.CheckFinished("pirate", report(app.state.adapters["pirate"], True)))
        await settled(pilot)
        assert "22.8%" in screen_text(app)
        changed = msgspec.structs.replace(app.state.adapters["pirate"], digest="00" * 32)
        app.engine.emit(p.AdapterChanged(changed))
        await settled(pilot)
        assert app.engine.of(p.CheckAdapter)[-1] == p.CheckAdapter("pirate", False) and "22.8%" not in screen_text(app)


async def test_the_header_and_the_first_lines_say_that_a_check_runs() -> None:
    app = bench_app()
    async with running(app, 80, 24) as pilot:
        app.engine._do_CheckAdapter = lambda command: None
        await pilot.press("tab", "f5")
        app.engine.emit(p.CheckProgress("pirate", "compares: chat"))
        await settled(pilot)
        lines = screen_text(app).splitlines()
        assert lines[0].rstrip().endswith("engine checks pirate") and any("being checked: compares: chat" in line for line in lines[:8])
        app.engine.emit(p.CheckFinished("pirate", report(app.state.adapters["pirate"], True)))
        await settled(pilot)
        lines = screen_text(app).splitlines()
        assert lines[0].rstrip().endswith("engine idle") and any("22.8%" in line for line in lines[:12])


async def test_esc_stops_a_check_and_leaves_when_none_runs() -> None:
    app = bench_app()
    async with running(app) as pilot:
        answer, app.engine._do_CheckAdapter = app.engine._do_CheckAdapter, lambda command: None
        await pilot.press("tab", "i")
        await wait_until(pilot, lambda: "esc Stop" in screen_text(app) and "esc Back" not in screen_text(app))
        await pilot.press("escape")
        await wait_until(pilot, lambda: "the check was stopped: F5 runs one" in screen_text(app))
        assert app.engine.of(p.CancelCheck) == [p.CancelCheck("pirate")] and len(app.engine.of(p.CheckAdapter)) == 1
        assert "esc Back" in screen_text(app) and any(entry.text == "check of pirate stopped" for entry in app.state.events)
        app.engine._do_CheckAdapter = answer
        await pilot.press("f5")
        await wait_until(pilot, lambda: "22.8%" in screen_text(app))
        app.engine._do_CheckAdapter = lambda command: None
        await pilot.press("f5")
        await wait_until(pilot, lambda: "esc Stop" in screen_text(app))
        await pilot.press("escape")
        await wait_until(pilot, lambda: "the check was stopped" in screen_text(app) and "22.8%" in screen_text(app))
        await pilot.press("f5")
        await wait_until(pilot, lambda: "esc Stop" in screen_text(app))
        await pilot.press("i")
        await wait_until(pilot, lambda: not isinstance(app.screen, DetailsScreen))
        assert len(app.engine.of(p.CancelCheck)) == 2, "the check goes on"
        await pilot.press("i", "escape", "escape")
        await wait_until(pilot, lambda: not isinstance(app.screen, DetailsScreen))
        assert len(app.engine.of(p.CancelCheck)) == 3


async def test_a_prompt_prefix_is_offered_and_never_applied_unasked() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "i")
        assert not app.screen.check_action("insert_prefix", ()) and not app.screen.check_action("system_prefix", ())
        info = msgspec.structs.replace(app.state.adapters["pirate"], prompt_prefix="Speak like a pirate.\n", digest="11" * 32)
        app.engine.adapters["pirate"] = info
        app.engine.emit(p.AdapterChanged(info))
        await wait_until(pilot, lambda: "expects before a prompt" in screen_text(app))
        assert app.control.system == "" and not app.engine.of(p.Generate)
        await pilot.press("p")
        await settled(pilot)
        assert app.screen.query_one(Prompt).text == "Speak like a pirate.\n" and app.control.system == ""
        await pilot.press("tab", "i", "s")
        await settled(pilot)
        assert app.control.system == "Speak like a pirate.\n" and "/system alone" in app.state.hint

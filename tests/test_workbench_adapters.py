"""The list of adapters under keys, mouse and events of a scripted engine."""
from __future__ import annotations

from bench_pilot import bench_app, last_mix, running, say, screen_text, settled, uses, wait_until
from textual import events

from lora_bench.engine import protocol as p
from lora_bench.workbench.state import StartAdapter
from lora_bench.workbench.widgets.adapter_list import AdapterList
from lora_bench.workbench.widgets.ask import AskField


async def test_keys_of_the_adapter_list() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "right", "right")
        assert app.state.board["pirate"].scale == 0.85
        await pilot.press("shift+left", "ctrl+right")
        assert app.state.board["pirate"].scale == 0.36
        await pilot.press("down", "space")
        assert last_mix(app) == uses(("pirate", 0.36))
        await pilot.press("s")
        assert last_mix(app) == uses(("json", 0.3)) and "solo: json" in screen_text(app)
        await pilot.press("m")
        assert last_mix(app) == () and "BYPASSED" in screen_text(app)
        await pilot.press("m", "s", "u", "0", "1", "p")
        assert app.engine.of(p.PinAdapter) == [p.PinAdapter("json", True)]


async def test_a_typed_scale_is_checked_in_place() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "enter", "x", "enter")
        await pilot.pause()
        assert "a scale is a number" in screen_text(app) and app.state.board["pirate"].scale == 0.75
        await pilot.press("end", "backspace", "minus", "1", ".", "2", "5", "enter")
        await settled(pilot)
        assert app.state.board["pirate"].scale == -1.25 and isinstance(app.screen.focused, AdapterList)
        await pilot.press("=", "9", "escape")
        assert app.state.board["pirate"].scale == -1.25


async def test_the_mouse_toggles_and_drags() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.click(AdapterList, offset=(2, 1))
        await settled(pilot)
        assert not app.state.board["json"].on
        name_width, bar_width = app.screen.query_one(AdapterList)._widths()
        start = 1 + 4 + name_width + 1
        await pilot.mouse_down(AdapterList, offset=(start, 0))
        await pilot.hover(AdapterList, offset=(start + bar_width - 1, 0))
        await pilot.mouse_up(AdapterList, offset=(start + bar_width - 1, 0))
        await settled(pilot)
        assert app.state.board["pirate"].scale == 2.0
        app.state.board.undo()
        assert app.state.board["pirate"].scale == 0.75, "one drag is one change"


async def test_adapters_are_added_by_pasted_paths(tmp_path) -> None:
    app = bench_app()
    spaced = tmp_path / "with space"
    spaced.mkdir()
    (tmp_path / "plain").mkdir()
    async with running(app) as pilot:
        await pilot.press("tab", "a")
        field = app.screen.query_one("#ask-field")
        field.value = "/no/such/place"
        await pilot.press("enter")
        await pilot.pause()
        assert "does not exist" in screen_text(app)
        field.value = f"'{spaced}' file://{tmp_path}/plain"
        await pilot.press("enter")
        await settled(pilot)
        assert [c.path for c in app.engine.of(p.LoadAdapter)[-2:]] == [str(spaced), f"{tmp_path}/plain"]
        assert "plain" in app.state.board.names


async def test_unloading_what_acts_needs_a_second_key() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "x")
        await pilot.pause()
        assert not app.engine.of(p.UnloadAdapter) and "x again" in screen_text(app)
        await pilot.press("x")
        await settled(pilot)
        assert app.state.board.names == ["json", "certainty"]


async def test_invocation_is_set_shown_and_invoked() -> None:
    app = bench_app("Paris.", "sure")
    async with running(app) as pilot:
        await say(pilot, "Capital?")
        await pilot.press("tab", "down", "down", "f")
        app.screen.query_one("#invocation-field").value = "is this right"
        await pilot.press("enter")
        await settled(pilot)
        assert "is this right = 3 tok: 0 1 2" in screen_text(app)
        await pilot.press("v")
        await settled(pilot)
        assert app.engine.of(p.Generate)[-1].prompt.opening == "is this right"
        assert "certainty on this chat (not part of it)" in screen_text(app).replace("\n", " ") or "⚑ certainty" in screen_text(app)


async def test_an_alora_that_is_switched_on_says_what_makes_it_act() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "down", "down", "space")
        await settled(pilot)
        assert "acts only after its invocation: v invokes it" in app.state.hint
        assert "aLoRA" in screen_text(app) and "acts only after its" in screen_text(app)


async def test_a_folder_of_adapters_adds_each_and_the_cursor_goes_to_the_first(tmp_path) -> None:
    for step in ("checkpoint-400", "checkpoint-800"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "adapter_config.json").write_text("{}")
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "a")
        app.screen.query_one("#ask-field").value = str(tmp_path)
        await pilot.press("enter")
        await wait_until(pilot, lambda: "checkpoint-800" in app.state.board.names)
        await settled(pilot)
        assert app.screen.query_one(AdapterList).current.name == "checkpoint-400"


async def test_a_field_says_when_a_paste_is_too_long_and_makes_lines_one() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "a")
        field = app.screen.query_one(AskField)
        field.post_message(events.Paste("x" * 1_000_000))
        await wait_until(pilot, lambda: app._notifications)
        assert field.value == "" and "977 KiB" in next(iter(app._notifications)).message
        field.post_message(events.Paste("/a/b\n/c/\x1b]2;d"))
        await wait_until(pilot, lambda: field.value == "/a/b /c/␛]2;d")


async def test_hundreds_of_adapters_scroll_under_the_cursor() -> None:
    app = bench_app(adapters=tuple(StartAdapter(f"/a/a{i:03}", on=False) for i in range(300)))
    async with running(app, 80, 24) as pilot:
        await pilot.press("tab")
        app.screen.query_one(AdapterList).move(250)
        await settled(pilot)
        assert "▸a250" in screen_text(app)
        await pilot.press("space")
        assert last_mix(app) == uses(("a250", 1.0))


async def test_loads_that_one_stop_ends_are_one_notice() -> None:
    app = bench_app()
    async with running(app) as pilot:
        for number in range(300):
            app.engine.emit(p.AdapterFailed("", f"/a/x{number}", f"/a/x{number}: loading was cancelled", cancelled=True))
            if number == 0:
                await settled(pilot)
                assert "adapter x0 was not" in screen_text(app)
        await settled(pilot)
        assert "x0, x1, x2 and 297 more" in screen_text(app) and len(app.state.items) == 1


async def test_paths_of_nobody_are_not_there() -> None:
    app = bench_app()
    async with running(app):
        assert app.control.add_paths("~nobody-of-that-name/x") == "~nobody-of-that-name/x does not exist"

"""Keys of the main screen: from pane to pane, in bursts, in the palette, the footer and the help."""
from __future__ import annotations

import random
from time import monotonic

from bench_pilot import bench_app, idle, last_mix, running, say, screen_text, send_keys, settled, wait_until

from lora_bench.engine import protocol as p
from lora_bench.workbench.keys import KEYS, bindings
from lora_bench.workbench.screens.help import HelpScreen
from lora_bench.workbench.screens.steady import Palette
from lora_bench.workbench.widgets.ask import AskField
from lora_bench.workbench.widgets.prompt import Prompt


async def test_escape_goes_to_the_adapters_and_back_and_keys_follow_at_once() -> None:
    app = bench_app("words")
    async with running(app) as pilot:
        prompt = app.screen.query_one(Prompt)
        await idle(pilot)
        send_keys(app, "n", "o", "t", "escape", "j", "space", "escape", "x", "j")
        await wait_until(pilot, lambda: prompt.text == "notxj")
        assert not app.state.board["json"].on
        send_keys(app, "tab", "enter", *"0.5", "enter", "shift+tab", "z")
        await wait_until(pilot, lambda: prompt.text == "notxjz")
        await wait_until(pilot, lambda: app.state.board["json"].scale == 0.5)


async def test_a_burst_of_keys_acts_in_its_order() -> None:
    app = bench_app("a")
    async with running(app) as pilot:
        prompt = app.screen.query_one(Prompt)
        send_keys(app, *"one", "ctrl+j", *"two", "ctrl+u", *"six", "ctrl+a", "x", "enter", *"next")
        await wait_until(pilot, lambda: prompt.text == "next")
        await wait_until(pilot, lambda: app.engine.of(p.Generate))
        assert app.engine.of(p.Generate)[-1].prompt.messages[-1].content == "one\nxsix"
        await pilot.press("ctrl+u", "tab")
        send_keys(app, "enter", *"9", "ctrl+u", *"0.25", "enter", "j", "space", "escape")
        await wait_until(pilot, lambda: app.state.board["pirate"].scale == 0.25 and not app.state.board["json"].on)


async def test_tab_goes_by_panes_not_by_replies() -> None:
    app = bench_app("a", "b")
    async with running(app) as pilot:
        await say(pilot, "one")
        await say(pilot, "two")
        seen = []
        for _ in range(4):
            await pilot.press("tab")
            seen.append(type(app.screen.focused).__name__)
        assert seen == ["AdapterList", "TurnView", "Prompt", "AdapterList"]
        await pilot.press("f9")
        assert isinstance(app.screen.focused, Prompt), "the pane that had the focus is folded"


async def test_escape_right_after_a_reply_ended_does_not_move_the_focus() -> None:
    app = bench_app("words")
    async with running(app) as pilot:
        await say(pilot, "x")
        app.screen._ended_at = monotonic() + 100
        await pilot.press("escape")
        assert isinstance(app.screen.focused, Prompt) and not app.engine.of(p.Abort)


async def test_help_opens_everywhere_and_explains_the_words() -> None:
    app = bench_app()
    async with running(app, 160, 140) as pilot:
        await pilot.press("f4", "f1")
        await wait_until(pilot, lambda: isinstance(app.screen, HelpScreen) and "Engine screen" in screen_text(app))
        assert "‖ΔW‖" in screen_text(app)


async def test_what_is_chosen_twice_in_the_palette_closes_it_once() -> None:
    app = bench_app()
    async with running(app) as pilot:
        below = app.screen
        await pilot.press("ctrl+p")
        await wait_until(pilot, lambda: isinstance(app.screen, Palette))
        palette = app.screen
        palette.dismiss()
        palette.dismiss()
        await pilot.pause()
        assert app.screen is below and app.is_running


def test_every_binding_has_an_id_of_its_own_and_a_line_of_help() -> None:
    ids = [binding.id for pane in KEYS for binding in bindings(pane)]
    assert len(ids) == len(set(ids)) and all(ids)
    assert all(key.help and key.label for keys in KEYS.values() for key in keys)
    others = [binding for owner in (AskField, HelpScreen) for binding in owner.BINDINGS]
    assert all(binding.id and binding.tooltip for binding in others)


async def test_every_binding_of_the_screen_is_in_the_palette_and_does_what_it_says() -> None:
    app = bench_app("words")
    async with running(app) as pilot:
        await say(pilot, "x")
        await idle(pilot)
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        for pane in app.screen.PALETTE_PANES:
            for key in KEYS[pane]:
                acts = pane != "bench" or key.action not in ("stop", "focus_prompt")  # Esc does one of three things
                assert (f"{key.help}  ({key.keys})" in commands) == acts
        await next(command for title, command in commands.items() if title.endswith("(m)")).callback()
        await settled(pilot)
        assert last_mix(app) == ()


async def test_help_speaks_of_the_focused_pane_first() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "f1")
        await pilot.pause()
        assert "Switch the adapter on or off" in screen_text(app)
        await pilot.press("escape", "f4")
        await settled(pilot)
        assert "EVENTS" in screen_text(app)
        await pilot.press("escape")
        assert app.screen.query(Prompt)


async def test_any_keys_in_any_order(seed: int) -> None:
    app = bench_app(*["some words"] * 40)
    rng = random.Random(seed)
    keys = [name for pane in KEYS for key in KEYS[pane] for name in key.keys.split(",") if name != "ctrl+q"]
    async with running(app, 100, 30) as pilot:
        for _ in range(40):
            await pilot.press(rng.choice([*keys, "tab", "x", "5", "ctrl+p", "pagedown", "home", "backspace"]))
        assert app.is_running


async def test_no_key_of_the_footer_is_cut_off_and_a_wide_one_has_all() -> None:
    app = bench_app()
    async with running(app, 80, 24) as pilot:
        await pilot.press("tab")
        for width, missing in ((80, "Value"), (60, "Solo"), (160, "")):
            await pilot.resize_terminal(width, 30)
            await wait_until(pilot, lambda missing=missing: ("Value" in (last := screen_text(app).splitlines()[-1])) is not bool(missing)
                             and "Prompt" in last)
            last = screen_text(app).splitlines()[-1]
            assert "palette" in last and "On/off" in last and (missing == "" or missing not in last)
            whole = [key for key in app.screen.query("FooterKey") if not key.has_class("-command-palette")]
            assert all(key.region.right <= app.screen.query_one(".-command-palette").region.x for key in whole)
            await pilot.pause(0.3)
            assert list(app.screen.query("FooterKey"))[:1] == whole[:1], "it is made again without end"

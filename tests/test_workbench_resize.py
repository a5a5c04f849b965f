"""Sizes that change faster than they are laid out, and keys that come before it."""
from __future__ import annotations

import pytest
from bench_pilot import bench_app, running, screen_text, settled, wait_until
from textual import events
from textual.command import CommandList
from textual.geometry import Size
from textual.widgets import OptionList

from lora_bench.workbench.screens.steady import Palette

NOW, BEFORE = Size(100, 30), Size(41, 6)


@pytest.mark.parametrize("key", ["", "f4", "f1", "ctrl+p", "ctrl+o"])
async def test_two_sizes_on_their_way_at_once_come_to_rest_at_that_of_the_terminal(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = bench_app()
    async with running(app, NOW.width, NOW.height) as pilot:
        if key:
            await pilot.press(key)
            await settled(pilot)
        laid_out: list[Size] = []
        refresh = app.screen._refresh_layout
        monkeypatch.setattr(app.screen, "_refresh_layout", lambda size=None, scroll=False: (laid_out.append(size), refresh(size, scroll)))
        for size in (BEFORE, NOW, BEFORE, NOW):
            app.screen.post_message(events.Resize(size, size))
        await pilot.pause(0.5)
        assert app.screen.outer_size == NOW
        assert BEFORE not in laid_out and len(laid_out) < 20


@pytest.mark.parametrize("key", ["pageup", "pagedown"])
async def test_a_page_key_before_a_list_is_laid_out_ends_nothing(key: str) -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("ctrl+p")
        commands = app.screen.query_one(CommandList)
        commands.styles.display = "none"
        await pilot.pause()
        await wait_until(pilot, lambda: not commands.scrollable_content_region)
        commands.clear_options().add_options(["one", "two"])
        await pilot.press(key)
        assert isinstance(app.screen, Palette)
        await pilot.press("escape")
        unseen = OptionList("one", "two")
        unseen.styles.display = "none"
        await app.screen.mount(unseen)
        await app.run_action(key.replace("page", "page_"), unseen)


@pytest.mark.parametrize("keys", [[], ["tab"], ["tab", "a"], ["tab", "f9"], ["f3"], ["f3", "tab"], ["f3", "tab", "m"], ["f3", "tab", "w"]])
async def test_the_pane_that_had_the_keys_has_them_again_after_sizes_that_hold_none(keys: list[str]) -> None:
    app = bench_app()
    async with running(app, 120, 36) as pilot:
        await wait_until(pilot, lambda: "esc Adapters" in screen_text(app))
        for key in keys:
            await pilot.press(key)
            await settled(pilot)
        pane, footer = app.focused, screen_text(app).splitlines()[-1]
        for size in ((20, 5), (10, 3), (120, 36), (120, 4), (19, 36), (120, 36)):
            await pilot.resize_terminal(*size)
            await settled(pilot)
        assert pane is not None and app.focused is pane and screen_text(app).splitlines()[-1] == footer

"""Sizes that change faster than they are laid out, and keys that come before it."""
from __future__ import annotations

import pytest
from bench_pilot import bench_app, running, settled, wait_until
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


@pytest.mark.parametrize("key", ["pageup", "pagedown", "home", "end", "up"])
async def test_a_key_before_a_list_is_laid_out_ends_nothing(key: str) -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("ctrl+p")
        await pilot.press("e")
        await wait_until(pilot, lambda: app.screen.query_one(CommandList).option_count)
        app.screen.query_one(CommandList).remove_class("--visible")
        app.screen.query_one(CommandList).styles.display = "none"
        await pilot.pause()
        assert not app.screen.query_one(CommandList).scrollable_content_region
        await pilot.press(key)
        assert isinstance(app.screen, Palette)
        await pilot.press("escape")
        await pilot.press("ctrl+o")
        models = app.screen.query_one("#models", OptionList)
        models.add_option("one")
        models.styles.display = "none"
        await pilot.pause()
        await app.run_action({"up": "cursor_up", "home": "first", "end": "last"}.get(key, key.replace("page", "page_")), models)
        assert app.is_running

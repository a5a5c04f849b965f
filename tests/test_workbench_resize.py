"""Sizes that change faster than they are laid out."""
from __future__ import annotations

import pytest
from bench_pilot import bench_app, running, settled
from textual import events
from textual.geometry import Size

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

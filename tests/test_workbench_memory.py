"""What a long run must not gather."""
from __future__ import annotations

import gc

from bench_pilot import bench_app, running, settled
from textual.widget import Widget


async def test_changing_panes_holds_no_key_of_a_footer_before() -> None:
    app = bench_app()
    async with running(app) as pilot:
        for _ in range(4):
            await pilot.press("tab", "shift+tab")
            await settled(pilot)
        gc.collect()
        held = [widget for widget in gc.get_objects() if isinstance(widget, Widget) and not widget.is_attached
                and type(widget).__name__ == "FooterKey" and widget.app is app]
        assert len(held) < 20

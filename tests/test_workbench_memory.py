"""What a long run must not gather."""
from __future__ import annotations

import gc

from bench_pilot import bench_app, running, settled
from textual.widget import Widget


async def test_changing_panes_holds_no_key_of_a_footer_before() -> None:
    app = bench_app()
    async with running(app) as pilot:
        before = held_keys()
        for _ in range(4):
            await pilot.press("tab", "shift+tab")
            await settled(pilot)
        assert held_keys() < before + 20


def held_keys() -> int:
    """Keys of footers that are on no screen any more and that something still holds, of other tests too."""
    gc.collect()
    return sum(type(each).__name__ == "FooterKey" and not each.is_attached for each in gc.get_objects() if isinstance(each, Widget))

"""The compare screen under the pilot: what it is asked, and the steps that many tests take."""
from __future__ import annotations

from bench_pilot import say, settled, uses, wait_until

from lora_bench.workbench.screens.compare import CompareScreen
from lora_bench.workbench.widgets.compare_columns import Columns

A = "Silicon seas roar,\nwarps set sail in lockstep, arr —\ncache lines guard the shore."
B = "Silicon dreams roar,\nwarps set sail in lockstep now —\ncache lines guard the core."
C = "Silicon dreams roar, and warps glide."
MIX = uses(("pirate", 0.75), ("json", 0.3))


def compare_of(app):
    return app.control.comparing.compare


async def asked(pilot, text: str = "A haiku about GPUs?"):
    """Open the screen if it is not there, ask, and wait for the figures."""
    app = pilot.app
    if not isinstance(app.screen, CompareScreen):
        await pilot.press("f3")
        await settled(pilot)
    await say(pilot, text)
    await wait_until(pilot, lambda: compare_of(app).run.scored)
    await settled(pilot)
    return compare_of(app).run


async def to_columns(pilot) -> Columns:
    await pilot.press("tab")
    await settled(pilot)
    return pilot.app.screen.query_one(Columns)

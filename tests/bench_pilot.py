"""The workbench under a test: the app over a scripted engine, and waiting for what it shows."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime

from fake_engine import FakeEngine
from textual import events
from textual.pilot import Pilot
from textual.widgets import Static

from lora_bench.engine import protocol as p
from lora_bench.workbench.app import BenchApp
from lora_bench.workbench.state import StartAdapter

ADAPTERS = (StartAdapter("/a/pirate", None, 0.75), StartAdapter("/a/json", None, 0.3), StartAdapter("/a/certainty", on=False))
NOW = datetime(2026, 1, 2, 14, 2, 11)


def bench_app(*replies: str, answers: bool = True, adapters: tuple[StartAdapter, ...] = ADAPTERS) -> BenchApp:
    """An app whose engine has started and gives these replies; the clock stands still."""
    inbox: deque[p.Event] = deque()
    engine = FakeEngine(inbox, answers)
    engine.replies.extend(replies)
    engine.start()
    app = BenchApp(engine, inbox, p.LoadModel(), adapters, clock=lambda: NOW)
    app.engine = engine
    return app


@asynccontextmanager
async def running(app: BenchApp, width: int = 120, height: int = 36) -> AsyncIterator[Pilot]:
    """The app on a screen of that size, its model and adapters loaded. Nothing glides: a test would wait for it."""
    app.animation_level = "none"
    async with app.run_test(size=(width, height)) as pilot:
        if app.engine.answers:
            await wait_until(pilot, lambda: app.state.model and not app.state.wanted and not app.inbox)
            await app.show()
        yield pilot


async def wait_until(pilot: Pilot, true: Callable[[], object], seconds: float = 20.0) -> None:
    """Let the app run until `true()`; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        await pilot.pause(0.02)


async def settled(pilot: Pilot) -> None:
    """All events are folded in and shown."""
    await wait_until(pilot, lambda: not pilot.app.inbox)
    for _ in range(2):  # what is drawn may change how much room there is to draw
        await pilot.app.show()
        await pilot.pause()


def send_keys(app: BenchApp, *names: str) -> None:
    """Keys at machine speed: all are there before the first is looked at."""
    for name in names:
        app.post_message(events.Key(name, name if len(name) == 1 else None))


async def say(pilot: Pilot, text: str) -> None:
    """Type a message and send it."""
    pilot.app.screen.query_one("#prompt").focus()
    pilot.app.screen.query_one("#prompt").text = text
    await pilot.press("enter")
    await settled(pilot)


def screen_text(app: BenchApp) -> str:
    """All characters of the screen as they are drawn, line by line."""
    compositor = app.screen._compositor
    return "\n".join("".join(segment.text for segment in strip) for strip in compositor.render_strips())


def text_of(widget: Static) -> str:
    """What a text of the screen says, on one line."""
    return " ".join(widget.render().plain.split())


def uses(*pairs: tuple[str, float]) -> p.Mix:
    """The mix of these names and scales."""
    return tuple(p.AdapterUse(name, scale) for name, scale in pairs)


def last_mix(app: BenchApp) -> p.Mix:
    """The mix that the engine was told last."""
    return app.engine.of(p.SetMix)[-1].mix


async def idle(pilot: Pilot) -> None:
    """Nothing runs, nor did a moment ago: Esc changes panes."""
    await wait_until(pilot, lambda: not pilot.app.screen.check_action("stop", ()))

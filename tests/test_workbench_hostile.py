"""Hostile text in every place of the screen: nothing reaches the terminal raw, nothing is read as markup."""
from __future__ import annotations

import unicodedata

import msgspec
import pytest
from bench_pilot import bench_app, running, say, screen_text, settled
from fake_engine import adapter, model, stats, step

from lora_bench.engine import protocol as p
from lora_bench.workbench.panels.item import ItemView
from lora_bench.workbench.screens.engine import EngineScreen
from lora_bench.workbench.state import StartAdapter

CONTROLS = "\x1b]2;PWNED\x1b\\ \x9b2J\x9d0;T\x9c \u202egnp\u202c a\rb\x08\x7f \ud800 \x1bPq\x1b\\ \n\n"
HOSTILE = {"closing tag": "[/x]", "markup": "[bold red]B [@click=app.quit]go $x {y} %s", "controls": "\x1b[31m" + CONTROLS,
           "long and wide": "漢字" * 40 + "x" * 500, "empty": ""}


def raw(app) -> list[str]:
    """Characters of the screen that a terminal would act on."""
    return [char for char in screen_text(app).replace("\n", "")
            if unicodedata.category(char) in ("Cc", "Cs") or "\u202a" <= char <= "\u202e"]


def everything(evil: str, name: str) -> list[p.Event]:
    """One of every event that carries text."""
    info = adapter(name, path=evil, format=evil, dtype=evil, base_model=evil, targets={evil: 3}, notes=(evil, evil), digest=evil,
                   invocation=evil or "x", invocation_tokens=(1, 2))
    mix = (p.AdapterUse(name, 0.5),)
    facts = model(name=evil, path=evil, dtype=evil, device=evil)
    view = p.AdapterView(info, "slot", 0, True)
    kv = p.KvView(16, 9, 9, 2, 1, (p.KvOwner(1, 2, 20, mix),), ((), mix), (p.KvRun(0, 2, 1, (1, 2)), p.KvRun(2, 1, 0), p.KvRun(3, 6, -1)))
    found = p.Activation(evil, True, 1, 2, evil, (evil, evil), evil, evil)
    cache = p.CacheUse(3, 1, missed_blocks=1, missed=(p.MissedRun(1, 1, "mix differs", evil),), remark=evil)
    return [
        p.ModelLoading(evil, evil, 1, 2), p.ModelLoaded(facts, 1.0), p.AdapterLoaded(info, 1.0), p.AdapterFailed(name, evil, evil),
        p.AdapterUnloading(evil, (1,)), p.AdapterChanged(info), p.SlotLoaded(0, name, 1, 1.0, evil, evil), p.SlotTouched(0, evil),
        p.SlotEvicted(1, evil, evil), p.HostLoaded(evil, 1, 1.0), p.HostEvicted(evil, 1, evil), p.MixRefused(mix, evil),
        p.RequestQueued(1, evil),
        p.RequestStarted(1, 3, (p.Activation(name, False, -1, 2, evil), found), cache),
        p.TextDelta(1, evil, 1), p.MixSet(mix, {1: 1}, {}, {1: 2}), p.InvocationFired(1, found, 1),
        p.TextDelta(1, f"`{evil}`\n# {evil}\n| {evil} | b |\n|---|---|\n| {evil} | c |\n", 2),
        p.RequestFinished(1, "stop", stats()), msgspec.structs.replace(step(1), path=evil),
        p.CommandFailed(evil), p.EngineFailed(evil, fatal=False),
        p.RequestPreempted(1, evil, 3), p.CacheCleared(2, evil), p.KvEvicted(1, 1, 2.0), p.Tokenized(1, (1,), (evil,), False, -1, evil),
        p.EngineSnapshot(facts, (view,), (p.SlotView(0, name, 8, 9, True, 1),), (p.PagesView(name, 1, 4, 9),), p.HostView(1, 2, (name,)),
                         kv, mix),
    ]


@pytest.mark.parametrize("evil", HOSTILE.values(), ids=HOSTILE)
async def test_no_event_text_acts_on_the_terminal(evil: str) -> None:
    app = bench_app(answers=False, adapters=(StartAdapter("/a", on=True),))
    name = evil or "named"
    async with running(app, 160, 60) as pilot:
        app.engine.emit(p.ModelLoaded(model(), 1.0), p.AdapterLoaded(adapter(name), 1.0))
        await settled(pilot)
        await say(pilot, f"hello {evil}")
        app.engine.emit(*everything(evil, name))
        await settled(pilot)
        assert not raw(app)
        await pilot.press("tab", "i", "f")
        await settled(pilot)
        await pilot.press("escape", "enter", "escape", "x")
        await settled(pilot)
        assert not raw(app)
        app.screen.query(ItemView).last().focus()
        await pilot.press("y", "f4")
        await settled(pilot)
        assert isinstance(app.screen, EngineScreen) and not raw(app)
        app.engine.emit(p.EngineFailed(evil))
        await pilot.press("escape")
        await settled(pilot)
        assert not raw(app) and "engine gone" in screen_text(app)


async def test_an_escape_split_over_tokens_stays_text() -> None:
    app = bench_app(answers=False, adapters=())
    async with running(app) as pilot:
        app.engine.emit(p.ModelLoaded(model(), 1.0))
        await settled(pilot)
        await say(pilot, "x")
        app.engine.emit(p.RequestStarted(1, 3), *(p.TextDelta(1, char, index) for index, char in enumerate("\x1b]0;own\x07")))
        await settled(pilot)
        assert not raw(app) and "␛]0;own␇" in screen_text(app)

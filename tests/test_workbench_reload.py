"""What the bench shows of adapters over time: files that change, reloads, loads that take long and are stopped."""
from __future__ import annotations

import pytest
from bench_pilot import bench_app, running, say, screen_text, settled
from fake_engine import adapter, stats
from msgspec.structs import replace

from lora_bench.engine import protocol as p
from lora_bench.workbench.app import BenchApp
from lora_bench.workbench.commands import run_command
from lora_bench.workbench.transcript import Notice

OLD, NEW = adapter("x").digest, "77aa55ee" * 8


def _reloaded(name: str = "pirate", old: str = OLD, new: str = NEW, changes: tuple[str, ...] = ("rank 16 → 32",),
              kept_for: tuple[int, ...] = (), kept_as: str = "") -> p.AdapterReloaded:
    return p.AdapterReloaded(adapter(name, digest=new), old, changes, (), kept_for, kept_as, 12.0)


def _file(app: BenchApp, name: str, what: str) -> None:
    """The engine saw what became of a file."""
    app.engine.emit(p.AdapterFileChanged(name, f"/a/{name}", what))
    snapshot = app.engine.snapshot()
    views = tuple(replace(view, file=what) if view.info.name == name and what != "back" else view for view in snapshot.adapters)
    app.engine.emit(replace(snapshot, adapters=views))


def _said(app: BenchApp) -> str:
    """All notices of the chat."""
    return "\n".join(item.text for item in app.state.items if isinstance(item, Notice))


def _line(app: BenchApp, name: str) -> str:
    return next(line for line in screen_text(app).splitlines() if f"] {name}" in line or f"]▸{name}" in line)


async def test_a_changed_file_is_marked_and_said_until_it_is_read_again() -> None:
    app = bench_app()
    async with running(app) as pilot:
        _file(app, "pirate", "changed")
        await settled(pilot)
        assert "≠" in _line(app, "pirate") and "≠" not in _line(app, "json")
        assert "pirate: its file changed on disk" in _said(app) and "≠ its file changed on disk" in screen_text(app)
        await pilot.press("tab", "R")
        assert app.engine.of(p.ReloadAdapter) == [p.ReloadAdapter("pirate")]
        app.engine.emit(_reloaded(), app.engine.snapshot())
        await settled(pilot)
        assert "≠" not in _line(app, "pirate")
        assert f"pirate was read again: sha {OLD[:8]} → 77aa55ee, rank 16 → 32" in _said(app)
        assert app.state.board["pirate"].scale == 0.75


async def test_a_deleted_file_is_another_mark_and_its_return_takes_it_away() -> None:
    app = bench_app()
    async with running(app) as pilot:
        _file(app, "json", "deleted")
        await settled(pilot)
        assert "∅" in _line(app, "json") and "json: its file is gone" in _said(app)
        _file(app, "json", "back")
        await settled(pilot)
        assert "∅" not in _line(app, "json") and "json: its file is again what was read" in _said(app)


async def test_a_reload_that_fails_says_why_and_that_the_old_content_stays() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "/reload json")
        assert "…" in _line(app, "json") and app.state.reads_adapters
        app.engine.emit(p.ReloadFailed("json", "/a/json: tensor 'x' has values that are not finite"))
        await settled(pilot)
        assert _said(app).endswith("json was not read again: /a/json: tensor 'x' has values that are not finite\nWhat was loaded stays as "
                                   "it is.")
        assert not app.state.reads_adapters and "…" not in _line(app, "json") and "json" in app.state.adapters


async def test_esc_stops_adapters_that_are_read_and_their_progress_is_shown() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.engine.answers = False
        await say(pilot, "/load pirate")  # the sample of that name: its path is not the one that is loaded
        (load,) = app.engine.of(p.LoadAdapter)[-1:]
        app.engine.emit(p.AdapterLoading("", load.path, 3 << 20, 12 << 20))
        await settled(pilot)
        assert "25%" in screen_text(app) and "3.0 MiB of 12.0 MiB · Esc stops it" in screen_text(app)
        await pilot.press("escape")
        assert app.engine.of(p.CancelLoad) and app.screen.pane() == "prompt"
        app.engine.emit(p.AdapterFailed("", load.path, f"{load.path}: loading was cancelled", cancelled=True))
        await settled(pilot)
        assert _said(app).endswith("was not loaded: stopped") and "Esc stops it" not in screen_text(app) and not app.state.reads_adapters


async def test_a_reload_in_progress_shows_its_share_in_the_list() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.control.reload("json")
        app.engine.emit(p.AdapterLoading("json", "/a/json", 1 << 30, 2 << 30))
        await settled(pilot)
        assert "50%" in _line(app, "json")
        app.engine.emit(p.EngineFailed("the engine process was killed"))
        await settled(pilot)
        assert not app.state.reloading and app.state.reading is None


async def test_replies_say_their_content_once_a_name_means_several() -> None:
    app = bench_app("Arr one", "Arr two")
    async with running(app) as pilot:
        await say(pilot, "hello")
        assert "@" not in screen_text(app)
        app.engine.emit(_reloaded())
        app.engine.adapters["pirate"] = adapter("pirate", digest=NEW)
        await settled(pilot)
        assert f"pirate@{OLD[:8]} ×0.75 + json ×0.30" in screen_text(app)
        await pilot.press("ctrl+r")  # greedy, the same mix: but other content
        await settled(pilot)
        (turn,) = [item for item in app.state.items if hasattr(item, "versions")]
        assert [version.marks for version in turn.versions] == [{"pirate": OLD[:8]}, {"pirate": NEW[:8]}]
        assert "pirate@77aa55ee ×0.75" in screen_text(app)
        await pilot.press("ctrl+r")
        assert "greedy decoding gives the same reply" in app.state.hint and len(turn.versions) == 2


async def test_a_reply_under_way_keeps_what_it_began_with() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "hello")
        number = app.engine.of(p.Generate)[-1].request_id
        app.engine.emit(p.RequestStarted(number, 31), p.TextDelta(number, "Arr", 1))
        before = app.state.adapters["pirate"].digest
        app.engine.emit(_reloaded(old=before, kept_for=(number,), kept_as="pirate@" + before[:8]))
        app.engine.emit(p.MixSet((p.AdapterUse("pirate", 0.5), p.AdapterUse("certainty")), {number: 1}))
        app.engine.emit(p.RequestFinished(number, "stop", stats(1)))
        await settled(pilot)
        version = app.state.version(number)
        assert version.contents["pirate"] == before and version.contents["certainty"] and version.marks == {"pirate": before[:8]}
        assert f"request {number} finishes on the old content" in _said(app)


async def test_a_checkpoint_that_appears_is_said_with_the_way_to_load_it() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.engine.emit(p.CheckpointAppeared("pirate", "/runs/x/checkpoint-300"))
        await settled(pilot)
        assert "/load /runs/x/checkpoint-300" in screen_text(app) and not app.state.wanted


def test_the_command_reloads_what_changed_and_refuses_what_is_not_there() -> None:
    app = bench_app()
    for event in (p.ModelLoaded(app.engine.snapshot().model, 1.0), p.AdapterLoaded(adapter("json"), 1.0)):
        app.control.receive(event)
    with pytest.raises(ValueError, match="none did"):
        run_command(app.control, "/reload")
    with pytest.raises(ValueError, match="x is no adapter of the list; there are json"):
        run_command(app.control, "/reload x")
    app.state.snapshot = replace(app.state.snapshot, adapters=(p.AdapterView(adapter("json"), "host", file="changed"),))
    assert run_command(app.control, "/reload") == "to be read again: json"
    assert app.engine.of(p.ReloadAdapter) == [p.ReloadAdapter("json")]
    with pytest.raises(ValueError, match="does not exist"):
        run_command(app.control, "/load /nowhere/at/all")

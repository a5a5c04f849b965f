"""The compare screen when something happens meanwhile: the chat, the engine, other content, hostile text, any keys and sizes."""
from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest
from bench_pilot import bench_app, running, say, screen_text, settled, uses, wait_until
from compare_pilot import A, B, C, asked, compare_of, to_columns
from fake_engine import adapter, model, stats

from lora_bench.engine import protocol as p
from lora_bench.workbench.keys import KEYS
from lora_bench.workbench.screens import compare
from lora_bench.workbench.screens.bench import BenchScreen
from lora_bench.workbench.screens.compare import CompareScreen
from lora_bench.workbench.screens.sweep import SweepScreen
from lora_bench.workbench.widgets.prompt import Prompt
from lora_bench.workbench.widgets.token_view import TokenView


async def test_the_chat_goes_on_meanwhile_and_a_comparison_too() -> None:
    app = bench_app("one two three")
    async with running(app) as pilot:
        await pilot.press("f3")
        await say(pilot, "compare this")
        number = compare_of(app).run.rows[0].request_id
        app.engine.emit(p.RequestStarted(number, 31), p.TextDelta(number, "Arr", 1))
        await pilot.press("f3")
        await settled(pilot)
        assert isinstance(app.screen, BenchScreen) and "engine compares" in screen_text(app)
        await say(pilot, "and this")
        await wait_until(pilot, lambda: not app.state.running)
        app.engine.emit(p.TextDelta(number, " more", 2), p.RequestFinished(number, "stop", stats(2), (1, 2)))
        await settled(pilot)
        assert compare_of(app).run.rows[0].text == "Arr more" and not app.engine.of(p.Score)
        assert not any("Arr" in version.text for version in app.state.versions())
        await pilot.press("f3")
        await settled(pilot)
        assert "Arr more" in screen_text(app)
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.engine.of(p.Abort))
        assert isinstance(app.screen, CompareScreen) and [abort.request_id for abort in app.engine.of(p.Abort)] == [number + 1]


async def test_ctrl_c_stops_the_comparison_and_not_the_chat() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "a chat")
        await pilot.press("f3")
        await settled(pilot)
        app.screen.query_one(Prompt).text = ""
        await say(pilot, "compare")
        await pilot.press("ctrl+c")
        await settled(pilot)
        assert {abort.request_id for abort in app.engine.of(p.Abort)} == {row.request_id for row in compare_of(app).run.rows}


async def test_a_dead_engine_loses_what_runs_keeps_what_was_said_and_says_so() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("f3")
        await say(pilot, "x")
        number = compare_of(app).run.rows[0].request_id
        app.engine.emit(p.RequestStarted(number, 31), p.TextDelta(number, "Arr", 1), p.EngineFailed("killed by signal 9"))
        await settled(pilot)
        shown = screen_text(app)
        assert "Arr" in shown and "✗ cut off: the engine stopped after 1 token" in shown and "before the first token" in shown
        assert "✗ killed by signal 9 · Ctrl+E starts it again" in shown and "engine gone" in shown
        await say(pilot, "again?")
        assert len(app.engine.of(p.GenerateTogether)) == 1 and app.screen.query_one(Prompt).text == "again?"
        await pilot.press("ctrl+e")
        await wait_until(pilot, lambda: app.state.model and not app.state.wanted)
        app.screen.query_one(Prompt).text = ""
        app.engine.replies.extend((A, B))
        await asked(pilot)
        assert "seas" in screen_text(app)


async def test_another_base_ends_what_runs_and_an_answer_of_the_old_one_is_not_taken() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("f3")
        await say(pilot, "x")
        rows = compare_of(app).run.rows
        app.engine.emit(p.ModelLoaded(model(name="Other"), 1.0))
        await settled(pilot)
        assert all(row.phase == "lost" for row in rows) and "another base was loaded" in screen_text(app)
        app.engine.emit(p.Scored(99, (), ()))
        await settled(pilot)
        assert compare_of(app).run.scored is None


async def test_an_adapter_that_is_unloaded_or_read_again_is_said() -> None:
    app = bench_app(A, B, A, B)
    async with running(app) as pilot:
        await asked(pilot)
        changed = adapter("pirate", digest="00" * 32)
        app.engine.emit(p.AdapterReloaded(changed, "3f1c9a" * 10, ("rank 16 → 8",), (), (), "", 1.0))
        await settled(pilot)
        assert "made with" in screen_text(app) and "pirate@3f1c9a3f" in screen_text(app)
        app.control.unload("json")
        await settled(pilot)
        assert "json was unloaded: column A goes on without it" in screen_text(app)
        assert compare_of(app).lanes[0].board.mix() == uses(("pirate", 0.75))
        app.state.adapters.pop("pirate")
        await say(pilot, "more")
        assert "column A has pirate: it is not loaded now" in screen_text(app) and len(app.engine.of(p.GenerateTogether)) == 1


async def test_figures_of_other_content_are_not_taken() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        app.engine._do_Score = lambda command: None
        await pilot.press("f3")
        await say(pilot, "x")
        (score,) = app.engine.of(p.Score)
        changed = p.AdapterReloaded(adapter("pirate", digest="00"), "3f", ("x",), (), (), "", 1.0)
        app.engine.emit(changed, p.Scored(score.score_id, (), ()))
        await settled(pilot)
        assert "no figures: pirate was read again while they were computed" in screen_text(app)


async def test_a_score_that_fails_is_said_where_the_figures_would_be() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        app.engine._do_Score = lambda command: app.engine.emit(p.ScoreFailed(command.score_id, "memory ran out [/x]"))
        await pilot.press("f3")
        await say(pilot, "x")
        assert "✗ no figures: memory ran out [/x]" in screen_text(app)
        await pilot.press("tab", "k")
        await settled(pilot)
        assert "no figures: memory ran out" in screen_text(app) and not app.screen.query_one(TokenView).display


async def test_figures_are_stopped_by_esc_or_by_another_prompt_and_the_replies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "JUST_ENDED_S", 0.0)
    app = bench_app(A, B, A, B, A, B)
    async with running(app) as pilot:
        app.engine._do_Score = lambda command: None  # it takes long
        await pilot.press("f3")
        await say(pilot, "one")
        assert "esc Stop" in screen_text(app).splitlines()[-1] and "KL is being computed" in screen_text(app)
        await pilot.press("escape")
        await settled(pilot)
        (first,) = app.engine.of(p.Score)
        assert app.engine.of(p.CancelScore) == [p.CancelScore(first.score_id)] and isinstance(app.screen, CompareScreen)
        app.engine.emit(p.ScoreFailed(first.score_id, "the reading of the text was stopped", cancelled=True))
        await settled(pilot)
        shown = screen_text(app)
        assert "no figures: stopped before they were computed: ask again" in shown and "seas" in shown
        assert "esc Back" in shown.splitlines()[-1] and not app.engine.of(p.Abort)
        await say(pilot, "two")
        await say(pilot, "three")
        second, third = app.engine.of(p.Score)[1:]
        assert app.engine.of(p.CancelScore)[1:] == [p.CancelScore(second.score_id)]
        app.engine.emit(p.ScoreFailed(second.score_id, "the reading of the text was stopped", cancelled=True))
        await pilot.press("f3")
        await settled(pilot)
        assert isinstance(app.screen, BenchScreen) and compare_of(app).run.score_id == third.score_id and compare_of(app).run.scoring
        assert len(app.engine.of(p.CancelScore)) == 2, "they go on while the chat is on the screen"
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("ctrl+c")
        await settled(pilot)
        assert app.engine.of(p.CancelScore)[2:] == [p.CancelScore(third.score_id)]
        del app.engine._do_Score
        app.engine._do_Score(third)  # it was ready before the engine heard of it
        await settled(pilot)
        assert compare_of(app).run.scored and not compare_of(app).run.score_failed


async def test_esc_right_after_the_replies_or_over_the_columns_leaves_the_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "JUST_ENDED_S", 60.0)
    app = bench_app()
    async with running(app) as pilot:
        app.engine._do_Score = lambda command: None
        await pilot.press("f3")
        await say(pilot, "one")
        numbers = [row.request_id for row in compare_of(app).run.rows]
        app.engine.emit(*(p.RequestStarted(number, 31) for number in numbers))
        await settled(pilot)
        app.engine.emit(*(p.RequestFinished(number, "stop", stats(1), (1,)) for number in numbers))
        await settled(pilot)
        await pilot.press("escape")
        await settled(pilot)
        monkeypatch.setattr(compare, "JUST_ENDED_S", 0.0)
        await pilot.press("tab", "m", "escape")
        await settled(pilot)
        assert isinstance(app.screen, CompareScreen) and compare_of(app).run.scoring and not app.engine.of(p.CancelScore)


ACTING = "[/x][bold]B $x \x1b]2;PWNED\x1b\\ \x9b2J \u202egnp\u202c\rb\x08 \ud800\n\n"


@pytest.mark.parametrize("evil", [ACTING, "漢字" * 40 + "x" * 300, ""], ids=["acting", "wide", "empty"])
async def test_no_text_of_a_model_or_a_name_acts_on_the_terminal(evil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = bench_app(f"{evil} one", f"two {evil}", f"{evil} one", f"two {evil}", *[evil or "x"] * 8)
    name = evil or "named"
    async with running(app, 100, 40) as pilot:
        app.engine.adapters[name] = adapter(name, path=evil, invocation=evil)
        app.engine.emit(p.AdapterLoaded(app.engine.adapters[name], 1.0))
        app.control.system = evil
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "m", "k", *["j"] * 5, "space", "escape", "v")
        await settled(pilot)
        await asked(pilot, f"ask {evil}")
        number = compare_of(app).run.rows[0].request_id
        app.engine.emit(p.RequestStarted(number, 3, (p.Activation(name, False, -1, 2, evil), p.Activation(evil, True, 1, 2, evil))),
                        p.RequestQueued(number + 1, evil))
        await settled(pilot)
        assert not acting(app)
        app.engine.emit(p.RequestFinished(number + 1, "stop", stats(1), (1,)))
        await to_columns(pilot)
        for keys in (("n", "N"), ("k", "end"), ("k", "e"), ("b", "w")):
            await pilot.press(*keys)
            await settled(pilot)
            assert not acting(app), keys
        await pilot.press("escape")


def acting(app) -> list[str]:
    """Characters of the screen that a terminal would act on."""
    shown = screen_text(app).replace("\n", "")
    return [char for char in shown if unicodedata.category(char) in ("Cc", "Cs") or "\u202a" <= char <= "\u202e"]


async def test_any_size_while_replies_are_written(seed: int) -> None:
    app = bench_app()
    rng = random.Random(seed)
    async with running(app) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "a", "escape", "a", "escape")
        await say(pilot, "x")
        numbers = [row.request_id for row in compare_of(app).run.rows]
        for step, (width, height) in enumerate([(20, 6), (160, 45), (19, 40), (77, 12), (39, 24)]):
            app.engine.emit(*(p.TextDelta(number, rng.choice([" word", "\n", " 漢字" * 9]), step + 1) for number in numbers))
            await pilot.resize_terminal(width, height)
            await pilot.press(rng.choice(["tab", "right", "m", "escape", "n", "shift+tab"]))
            await settled(pilot)
        app.engine.emit(*(p.RequestFailed(number, "gone") for number in numbers))
        await settled(pilot)
        assert app.is_running


async def test_any_keys_in_any_order(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = bench_app(*[A, B, C, C] * 60)
    rng = random.Random(seed)
    panes = ("compare", "columns", "mix", "tokens", "sweep")
    keys = [name for pane in panes for key in KEYS[pane] for name in key.keys.split(",")]
    async with running(app, 100, 30) as pilot:
        await asked(pilot)
        for _ in range(24):
            if not isinstance(app.screen, CompareScreen | SweepScreen):
                await pilot.press("escape", "f3")
            await pilot.press(rng.choice([*keys, "tab", "tab", "x", "5", "enter"]))
        assert app.is_running

"""The compare screen under a scripted engine: columns, differences, tokens, blind votes, sweeps, exports, and what goes wrong meanwhile."""
from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest
from bench_pilot import bench_app, running, say, screen_text, send_keys, settled, uses, wait_until
from fake_engine import adapter, model, stats, tokens_of

from lora_bench.engine import protocol as p
from lora_bench.workbench.compare_text import marked
from lora_bench.workbench.keys import KEYS
from lora_bench.workbench.screens.bench import BenchScreen
from lora_bench.workbench.screens.compare import CompareScreen
from lora_bench.workbench.screens.sweep import SweepScreen
from lora_bench.workbench.votes import VoteFile
from lora_bench.workbench.widgets.compare_columns import Columns, CompareColumn
from lora_bench.workbench.widgets.prompt import Prompt
from lora_bench.workbench.widgets.token_view import TokenView

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


async def test_one_prompt_goes_to_all_columns_as_rows_of_one_batch_and_is_scored() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        await asked(pilot)
        (together,) = app.engine.of(p.GenerateTogether)
        assert [request.mix for request in together.requests] == [MIX, ()]
        assert len({(request.prompt, request.sampling) for request in together.requests}) == 1
        assert together.requests[0].prompt == p.Chat((p.Message("user", "A haiku about GPUs?"),))
        (score,) = app.engine.of(p.Score)
        assert score.mixes[:2] == (MIX, ()) and set(score.mixes[2:]) == {uses(("json", 0.3)), uses(("pirate", 0.75))}
        assert score.reply == compare_of(app).run.rows[0].ids and len(score.reply) == len(tokens_of(A))
        shown = screen_text(app)
        for part in ("A  pirate ×0.75 + json ×0.30", "B  base", "first difference at token 1, ' seas' and ' dreams'", "KL(A‖B)",
                     "prefix 16/31 reused", "log-probability by adapter", "no blind votes", "“A haiku about GPUs?”"):
            assert part in shown, part
        assert "Ctrl+R asks again" not in shown


def styles_of(app, text: str) -> list[tuple[bool, bool]]:
    """(underlined, coloured apart from the plain text) of every cell run that holds `text`."""
    segments = [segment for strip in app.screen._compositor.render_strips() for segment in strip]
    plain = next(segment.style.color for segment in segments if segment.text.startswith("Silicon"))
    return [(bool(segment.style.underline), segment.style.color != plain) for segment in segments if segment.text.strip() == text]


@pytest.mark.parametrize("no_color", ["", "1"])
async def test_what_differs_is_underlined_and_coloured(no_color: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    app = bench_app(A, B)
    async with running(app) as pilot:
        await asked(pilot)
        for word in ("seas", "dreams", "shore.", "core."):
            ((underlined, coloured),) = styles_of(app, word)
            assert underlined and (coloured or no_color), word
        assert not any(segment.style.underline for strip in app.screen._compositor.render_strips() for segment in strip
                       if segment.text.strip() == "roar,")


def test_a_place_where_words_are_missing_is_marked_too() -> None:
    assert [(span.start, span.end) for span in marked("one two", [(3, 3), (0, 0), (4, 7)]).spans] == [(2, 3), (0, 1), (4, 7)]
    assert marked("", [(0, 0)]).plain == ""


async def test_n_goes_through_the_differences_and_scrolls_both_columns_there() -> None:
    long = [" ".join(f"{word}{i}" if i in (3, 180) else f"word{i}" for i in range(200)) for word in ("left", "right")]
    app = bench_app(*long)
    async with running(app, 80, 24) as pilot:
        await asked(pilot)
        columns = await to_columns(pilot)
        await pilot.press("home", "n")
        await settled(pilot)
        assert "difference 1 of 2" in screen_text(app) and "left3" in screen_text(app)
        segments = [segment for strip in app.screen._compositor.render_strips() for segment in strip]
        assert {segment.text.strip() for segment in segments if segment.style.underline and segment.style.reverse} == {"left3", "right3"}
        await pilot.press("n")
        await settled(pilot)
        assert all(part in screen_text(app) for part in ("difference 2 of 2", "left180", "right180"))
        assert "left3 " not in screen_text(app) and columns.column(1).scroll.scroll_y > 0
        await pilot.press("n")
        await settled(pilot)
        assert "difference 1 of 2" in screen_text(app) and "right3" in screen_text(app)
        await pilot.press("N")
        await settled(pilot)
        assert "difference 2 of 2" in screen_text(app)


async def test_columns_scroll_together_until_y() -> None:
    app = bench_app(*(" ".join(f"{word}{i}" for i in range(300)) for word in "ab"))
    async with running(app, 80, 24) as pilot:
        await asked(pilot)
        columns = await to_columns(pilot)
        one, two = columns.column(0).scroll, columns.column(1).scroll
        await pilot.press("home", "down", "down", "down")
        await settled(pilot)
        assert one.scroll_y == two.scroll_y == 3
        await pilot.press("y", "end")
        await settled(pilot)
        assert one.scroll_y == one.max_scroll_y and two.scroll_y == 3 and "scrolling apart" in screen_text(app)
        await pilot.press("y", "right", "home")
        await settled(pilot)
        assert one.scroll_y == two.scroll_y == 0
        columns.column(1).scroll.scroll_to(y=5, animate=False)
        await settled(pilot)
        assert one.scroll_y == 5, "a wheel or a scroll bar takes the other along"


async def test_a_column_has_a_mix_of_its_own_and_the_chats_board_stays() -> None:
    app = bench_app(A, B, A, B, C)
    async with running(app) as pilot:
        await asked(pilot)
        await to_columns(pilot)
        send_keys(app, "right", "m", "space", "enter", *"0.5", "enter", "j", "space", "escape")
        await wait_until(pilot, lambda: compare_of(app).lanes[1].board.mix() == uses(("pirate", 0.5), ("json", 0.3)))
        await wait_until(pilot, lambda: isinstance(app.screen.focused, CompareColumn))
        await settled(pilot)
        assert app.state.mix() == MIX and compare_of(app).lanes[0].board.mix() == MIX
        shown = screen_text(app)
        assert "B  pirate ×0.50 + json ×0.30" in shown and "made with base: Ctrl+R asks again" in shown
        await pilot.press("a", "m", "escape")
        await settled(pilot)
        assert [lane.label for lane in compare_of(app).lanes] == ["A", "B", "C"] and compare_of(app).lanes[2].board.mix() == ()
        await pilot.press("ctrl+r")
        await wait_until(pilot, lambda: len(app.engine.of(p.GenerateTogether)) == 2)
        assert [request.mix for request in app.engine.of(p.GenerateTogether)[1].requests] == [MIX, uses(("pirate", 0.5), ("json", 0.3)), ()]
        await settled(pilot)
        await pilot.press("x", "x")
        await settled(pilot)
        assert [lane.label for lane in compare_of(app).lanes] == ["A", "B"] and "two columns are the least" in screen_text(app)
        await pilot.press("c")
        await settled(pilot)
        assert compare_of(app).lanes[1].board.mix() == MIX


async def test_a_sampled_prompt_is_asked_again_with_the_next_seed_and_one_seed_for_all() -> None:
    app = bench_app(A, B, A, B)
    async with running(app) as pilot:
        app.control.set_sampling(temperature=0.7, seed=5)
        await asked(pilot)
        await pilot.press("ctrl+r")
        await wait_until(pilot, lambda: len(app.engine.of(p.GenerateTogether)) == 2)
        seeds = [{request.sampling.seed for request in together.requests} for together in app.engine.of(p.GenerateTogether)]
        assert seeds == [{5}, {6}] and "the same noise for all: seed 6" in screen_text(app)


async def test_the_token_view_tells_of_one_token_and_which_adapter_moved_it() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        run = await asked(pilot)
        await to_columns(pilot)
        await pilot.press("k", "n")
        await settled(pilot)
        tokens = app.screen.query_one(TokenView)
        assert tokens.cursor == 1 and run.scored.tokens[1].text == " seas"
        shown = screen_text(app)
        for part in ("token 1 of", "' seas'", "' now'", "KL(A‖B) 1.500 nats", "Δ logprob +1.50", "rank 38", "json +4.50, pirate +3.00"):
            assert part in shown, part
        await pilot.press("right", "right", "N")
        await settled(pilot)
        assert tokens.cursor == 1
        await pilot.press("end", "escape")
        await settled(pilot)
        assert not tokens.display and isinstance(app.screen.focused, CompareColumn) and isinstance(app.screen, CompareScreen)


@pytest.mark.parametrize("key", ["1", "2", "3", "4"])
async def test_a_blind_vote_hides_the_names_until_it_is_given_and_is_kept(key: str) -> None:
    app = bench_app(A, B, A, B)
    async with running(app) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "b")
        await settled(pilot)
        run = await asked(pilot)
        shown = screen_text(app)
        assert "×0.75" not in shown and "base" not in shown.replace("base: Ctrl", "") and "KL(" not in shown and "reused" not in shown
        columns = await to_columns(pilot)
        last = screen_text(app).splitlines()[-1]
        assert all(f"{number} {label}" in last for number, label in ((1, "Left"), (2, "Right"), (3, "Tie"), (4, "Both bad")))
        assert "Sweep" not in last and "Mix" not in last, "what cannot be now has no key"
        await pilot.press("e", "k", "w", "m")
        await settled(pilot)
        assert "vote first" in screen_text(app) and "×0.75" not in screen_text(app)
        assert not app.screen.query_one(TokenView).display and isinstance(app.screen.focused, CompareColumn)
        assert [side.text for side in columns.sides] == [run.rows[place].text for place in run.order]
        await pilot.press(key)
        await settled(pilot)
        left, right = (("A", "B") if run.order == (0, 1) else ("B", "A"))
        won = {"1": left, "2": right}.get(key, "")
        tally = VoteFile(app.control.comparing.votes.path).counts(run.tally)[0]
        assert (tally.first, tally.second, tally.tie, tally.bad) == (won == "A", won == "B", key == "3", key == "4")
        last = screen_text(app).splitlines()[-1]
        assert "Left" not in last and "Sweep" in last
        assert "A  pirate ×0.75" in screen_text(app) and f"votes A {int(won == 'A')} · B {int(won == 'B')}" in screen_text(app)
        await pilot.press(key)
        await settled(pilot)
        assert VoteFile(app.control.comparing.votes.path).counts(run.tally)[0].total == 1, "one vote for a pair of replies"


async def test_blind_sides_are_drawn_anew_and_pairs_by_lot(seed: int) -> None:
    app = bench_app()
    app.control.comparing._rng = random.Random(seed)
    async with running(app) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "a", "space", "escape")
        await settled(pilot)
        comparing = app.control.comparing
        compare_of(app).blind = True
        orders, pairs = set(), set()
        for _ in range(40):
            assert comparing.ask("x", "", p.Sampling())
            for row in compare_of(app).run.rows:
                row.phase = "done"
            orders.add(compare_of(app).run.order)
            pairs.add(tuple(column.label for column in compare_of(app).run.setup.columns))
        assert orders == {(0, 1), (1, 0)} and pairs == {("A", "B"), ("A", "C"), ("B", "C")}


async def test_columns_that_compute_the_same_are_no_pair_to_vote_on() -> None:
    app = bench_app(*[A, B] * 9)
    async with running(app) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "a", "escape", "b")  # C is as A
        await settled(pilot)
        comparing, compare = app.control.comparing, compare_of(app)
        for _ in range(8):
            assert comparing.ask("x", "", p.Sampling())
            assert "B" in [column.label for column in compare.run.setup.columns]
            compare.run = None
        compare.lanes[1].board.take(compare.lanes[0].board.now)
        await say(pilot, "who is better?")
        assert "nothing to vote on" in screen_text(app) and compare.run is None
        assert app.screen.query_one(Prompt).text == "who is better?", "it waits there"


async def test_a_vote_that_was_not_blind_or_too_early_is_refused() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        await asked(pilot)
        await to_columns(pilot)
        await pilot.press("1")
        await settled(pilot)
        assert "votes are blind: b" in screen_text(app)
        await pilot.press("b")
        await say(pilot, "more")
        await to_columns(pilot)
        await pilot.press("1")
        await settled(pilot)
        assert "vote when both replies are there" in screen_text(app) and compare_of(app).run.hidden
        assert not app.control.comparing.votes.path.exists()
        number = compare_of(app).run.rows[0].request_id
        app.engine.emit(*(p.RequestFailed(number + i, "no room") for i in range(2)))
        await settled(pilot)
        assert "nothing to vote on" in screen_text(app) and "✗ no room" in screen_text(app) and "A  pirate" in screen_text(app)


async def test_what_was_too_early_is_not_said_any_more_when_it_can_be() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.engine.answers = False
        await pilot.press("f3")
        await settled(pilot)
        await say(pilot, "A haiku?")
        await to_columns(pilot)
        for key, said in (("k", "no figures yet"), ("e", "wait until all replies"), ("ctrl+r", "Esc stops them")):
            await pilot.press(key)
            await settled(pilot)
            assert said in screen_text(app)
        numbers = [row.request_id for row in compare_of(app).run.rows]
        app.engine.emit(*(p.RequestFailed(number, "no room") for number in numbers))
        await settled(pilot)
        assert "Esc stops them" not in screen_text(app)


async def test_a_sweep_runs_all_scales_in_one_batch_and_draws_kl_against_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = bench_app(*[A, B, C] * 4)
    async with running(app) as pilot:
        await pilot.press("f3")
        app.screen.query_one(Prompt).text = "A haiku?"
        await pilot.press("tab", "w")
        await settled(pilot)
        await pilot.press("ctrl+u", *"pirate 0:9", "enter")
        await settled(pilot)
        assert "START:END:STEP" in screen_text(app) and not app.engine.of(p.GenerateTogether)
        await pilot.press("ctrl+u", *"pirate 0:1.5:0.25", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, SweepScreen) and compare_of(app).sweep.scored)
        await settled(pilot)
        (together,) = app.engine.of(p.GenerateTogether)
        mixes = [request.mix for request in together.requests]
        assert [next((use.scale for use in mix if use.name == "pirate"), 0.0) for mix in mixes] == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5]
        assert all(p.AdapterUse("json", 0.3) in mix for mix in mixes) and app.engine.of(p.Score)[0].mixes == tuple(mixes)
        shown = screen_text(app)
        assert all(part in shown for part in ("SWEEP OF pirate", "KL(×0 ‖ scale)", "┤", "┼", "▸ ×0.00", "×1.50"))
        await pilot.press("down", "e")
        await settled(pilot)
        (report,) = tmp_path.glob("sweep-*.md")
        assert report.name in screen_text(app) and "▸ ×0.25" in screen_text(app) and "pirate ×0.25 + json ×0.30" in screen_text(app)
        assert "Sweep of pirate" in report.read_text() and len(json.loads(report.with_suffix(".jsonl").read_text())["columns"]) == 7
        await pilot.press("escape")
        await settled(pilot)
        assert isinstance(app.screen, CompareScreen)


async def test_an_export_names_its_files_and_writes_over_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = bench_app(A, B)
    async with running(app) as pilot:
        await asked(pilot)
        await to_columns(pilot)
        await pilot.press("e", "e")
        await settled(pilot)
        files = sorted(path.name for path in tmp_path.iterdir())
        assert files == [f"compare-20260102-140211{end}" for end in ("-1.jsonl", "-1.md", ".jsonl", ".md")]
        assert "written: compare-20260102-140211-1.md" in screen_text(app)
        data = json.loads((tmp_path / files[2]).read_text())
        assert [column["text"] for column in data["columns"]] == [A, B] and data["adapters"][0]["digest"] == "3f1c9a" * 10
        assert "lora-bench compare" in (tmp_path / files[3]).read_text()
        tmp_path.chmod(0o500)
        monkeypatch.setattr("pathlib.Path.open", refuse)
        await pilot.press("e")
        await settled(pilot)
        assert "nothing was written" in screen_text(app)
        tmp_path.chmod(0o700)


def refuse(self, *_, **__):
    raise PermissionError(13, "Permission denied", str(self))


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


async def test_the_last_question_of_the_chat_is_offered_and_the_chat_can_come_before() -> None:
    app = bench_app("an answer", A, B)
    async with running(app) as pilot:
        app.control.system = "Be brief."
        await say(pilot, "a question")
        await pilot.press("f3")
        await settled(pilot)
        prompt = app.screen.query_one(Prompt)
        assert prompt.text == "a question" and prompt.selected_text == "a question"
        await pilot.press("tab", "h")
        await settled(pilot)
        assert "after 2 messages of the chat · system message" in screen_text(app)
        await asked(pilot, "what more?")
        chat = app.engine.of(p.GenerateTogether)[0].requests[0].prompt
        assert [message.content for message in chat.messages] == ["Be brief.", "a question", "an answer", "what more?"]


async def test_an_alora_is_invoked_for_all_columns_and_one_that_did_not_act_is_said() -> None:
    app = bench_app(A, B, answers=True)
    async with running(app) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "m", "j", "j", "space", "escape", "v")
        await settled(pilot)
        assert "⚑ ends with <|judge|>" in screen_text(app)
        await asked(pilot)
        assert {request.prompt.opening for request in app.engine.of(p.GenerateTogether)[0].requests} == {"<|judge|>"}
        number = compare_of(app).run.rows[0].request_id
        app.engine.emit(p.RequestStarted(number, 31, (p.Activation("certainty", False, -1, 3, "nearest: «<|jud»"),)))
        await settled(pilot)
        assert "⚑ certainty did not act" in screen_text(app)


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
        app.engine.emit(p.Scored(99, 3, (), ()))
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
        app.engine.emit(changed, p.Scored(score.score_id, 1, (), ()))
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


CONTROLS = "\x1b]2;PWNED\x1b\\ \x9b2J \u202egnp\u202c\rb\x08 \ud800\n\n"


@pytest.mark.parametrize("evil", ["[/x][bold]B $x", CONTROLS, "漢字" * 40 + "x" * 300, ""], ids=["markup", "controls", "wide", "empty"])
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
        for step, (width, height) in enumerate([(20, 6), (80, 24), (19, 40), (160, 45), (30, 10), (77, 12), (200, 60), (39, 24)]):
            app.engine.emit(*(p.TextDelta(number, rng.choice([" word", "\n", " 漢字" * 9]), step + 1) for number in numbers))
            await pilot.resize_terminal(width, height)
            await pilot.press(rng.choice(["tab", "right", "m", "escape", "n", "shift+tab"]))
            await settled(pilot)
        app.engine.emit(*(p.RequestFailed(number, "gone") for number in numbers))
        await settled(pilot)
        assert app.is_running


async def test_narrow_terminals_show_fewer_columns_and_tab_brings_the_others() -> None:
    app = bench_app(A, B, C, C)
    async with running(app, 80, 24) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "a", "escape", "a", "escape")
        await asked(pilot)
        seen = []
        for _ in range(5):
            await pilot.press("tab")
            await settled(pilot)
            seen.append([column.place for column in app.screen.query(CompareColumn) if column.display])
        assert seen[:4] == [[0, 1], [0, 1], [0, 2], [0, 3]] and isinstance(app.screen.focused, Prompt)
        assert "2 more by Tab" in screen_text(app)
        await pilot.resize_terminal(50, 24)
        await pilot.press("tab")
        await settled(pilot)
        assert [column.place for column in app.screen.query(CompareColumn) if column.display] == [0]


@pytest.mark.parametrize("size", [(160, 45), (80, 24), (60, 15), (50, 12), (24, 10)])
async def test_everything_is_on_the_screen_whatever_its_size(size: tuple[int, int]) -> None:
    app = bench_app(A, B)
    async with running(app, *size) as pilot:
        await asked(pilot)
        for keys in ((), ("tab",), ("k",), ("escape", "m")):
            await pilot.press(*keys)
            await settled(pilot)
            screen = app.screen
            shown = [screen.query_one(Prompt), *(key for key in screen.query("FooterKey")), *screen.query("#token-view, #mix-editor")]
            for widget in (each for each in shown if each.display):
                assert screen.region.contains_region(widget.region), (keys, widget)
            palette = screen.query_one(".-command-palette").region
            assert all(key.region.right <= palette.x for key in screen.query("FooterKey").exclude(".-command-palette")), keys


async def test_an_offered_question_is_typed_over_however_often_the_screen_is_opened() -> None:
    app = bench_app("arr", A, B)
    async with running(app) as pilot:
        await say(pilot, "What be a ship?")
        for _ in range(2):
            await pilot.press("f3")
            await settled(pilot)
            await pilot.press("escape")
            await settled(pilot)
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("W", "h", "y", "?")
        await settled(pilot)
        assert app.screen.query_one(Prompt).text == "Why?"


async def test_any_keys_in_any_order(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = bench_app(*[A, B, C, C] * 60)
    rng = random.Random(seed)
    panes = ("compare", "columns", "mix", "tokens", "sweep")
    keys = [name for pane in panes for key in KEYS[pane] for name in key.keys.split(",")]
    async with running(app, 100, 30) as pilot:
        await asked(pilot)
        for _ in range(40):
            if not isinstance(app.screen, CompareScreen | SweepScreen):
                await pilot.press("escape", "f3")
            await pilot.press(rng.choice([*keys, "tab", "tab", "x", "5", "enter"]))
        assert app.is_running


async def test_the_keys_of_every_pane_are_in_the_palette() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        await asked(pilot)
        await to_columns(pilot)
        titles = [command.title for command in app.get_system_commands(app.screen)]
        for pane in ("columns", "prompt"):
            assert all(f"{key.help}  ({key.keys})" in titles for key in KEYS[pane])
        assert not any("The token before" in title for title in titles)
        await pilot.press("k")
        await settled(pilot)
        assert any("The token before" in command.title for command in app.get_system_commands(app.screen))
        await pilot.press("f1")
        await settled(pilot)
        assert "Tokens of a comparison" in screen_text(app)


async def test_slash_commands_and_problems_of_the_prompt_stay_on_the_screen() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        await pilot.press("f3")
        await say(pilot, "/set temperature 0.5")
        assert "temperature 0.5" in screen_text(app) and not app.state.items
        await say(pilot, "/nothing")
        assert "/nothing is no command" in screen_text(app)
        await pilot.press("escape", "f3")
        await settled(pilot)
        assert app.screen.query_one(Prompt).text == "/nothing", "what was typed and not sent is there again"

"""The compare screen under a scripted engine: columns, differences, tokens, sweeps, exports."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_pilot import bench_app, running, say, screen_text, send_keys, settled, uses, wait_until
from compare_pilot import MIX, A, B, C, asked, compare_of, to_columns
from fake_engine import tokens_of

from lora_bench.engine import protocol as p
from lora_bench.workbench.compare_text import marked
from lora_bench.workbench.keys import KEYS
from lora_bench.workbench.screens.compare import CompareScreen
from lora_bench.workbench.screens.sweep import SweepScreen
from lora_bench.workbench.widgets.compare_columns import CompareColumn
from lora_bench.workbench.widgets.prompt import Prompt
from lora_bench.workbench.widgets.token_view import TokenView


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


async def test_everything_is_on_the_screen_whatever_its_size() -> None:
    app = bench_app(A, B)
    async with running(app, 24, 10) as pilot:
        await asked(pilot)
        for size in ((24, 10), (160, 45), (80, 24), (60, 15), (50, 12)):
            await pilot.resize_terminal(*size)
            for keys in ((), ("tab",), ("k",), ("escape", "m"), ("escape", "shift+tab")):
                await pilot.press(*keys)
                await settled(pilot)
                screen, at = app.screen, (size, keys)
                assert screen.size == size
                shown = [screen.query_one(Prompt), *(key for key in screen.query("FooterKey")), *screen.query("#token-view, #mix-editor")]
                for widget in (each for each in shown if each.display):
                    assert screen.region.contains_region(widget.region), (at, widget)
                palette = screen.query_one(".-command-palette").region
                assert all(key.region.right <= palette.x for key in screen.query("FooterKey").exclude(".-command-palette")), at
                over = [screen.query_one(name).display for name in ("#token-view", "#mix-editor")]
                assert over == ["k" in keys, "m" in keys], at


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


async def test_the_keys_of_every_pane_are_in_the_palette() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        await asked(pilot)
        await to_columns(pilot)
        titles = [command.title for command in app.get_system_commands(app.screen)]
        for pane in ("columns", "prompt"):
            assert all(f"{key.help}  ({key.keys})" in titles for key in KEYS[pane] if key.action != "names")
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

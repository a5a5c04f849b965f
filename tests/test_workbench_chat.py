"""What is said in the chat, under keys and events of a scripted engine: replies, versions, the prompt."""
from __future__ import annotations

from bench_pilot import bench_app, last_mix, running, say, screen_text, send_keys, settled, wait_until
from fake_engine import stats
from textual import events

from lora_bench.engine import protocol as p
from lora_bench.workbench.control import MAX_PROMPT
from lora_bench.workbench.panels.turn import TurnView
from lora_bench.workbench.widgets.prompt import Prompt


async def test_a_reply_without_text_says_so() -> None:
    app = bench_app("\n")
    async with running(app) as pilot:
        await say(pilot, "A haiku?")
        await wait_until(pilot, lambda: "no text" in screen_text(app))


async def test_a_question_is_answered_with_its_meter() -> None:
    app = bench_app("Arr, **silicon** seas\nroar")
    async with running(app) as pilot:
        await say(pilot, "A haiku?")
        await wait_until(pilot, lambda: not app.state.running)
        await settled(pilot)
        shown = screen_text(app)
        assert "A haiku?" in shown and "Arr, silicon seas" in shown and "3 tok · 11.8 tok/s · TTFT 0.41 s" in shown
        assert app.screen.query_one(Prompt).text == ""


async def test_nothing_a_model_says_is_hidden_by_markdown() -> None:
    app = bench_app("<think> &#8238;a &lt;b [x]: http://y\n\n[r]: http://z <b>bold</b> <|im_end|>")
    async with running(app) as pilot:
        await say(pilot, "x")
        await wait_until(pilot, lambda: not app.state.running)
        await settled(pilot)
        shown = screen_text(app)
        for part in ("<think>", "&#8238;a", "&lt;b", "[r]:", "<b>bold</b>", "<|im_end|>"):
            assert part in shown, part


async def test_versions_are_switched_on_the_focused_reply() -> None:
    app = bench_app("first words", "second words")
    async with running(app) as pilot:
        await say(pilot, "x")
        app.state.board.toggle("pirate")
        await pilot.press("ctrl+r")
        await settled(pilot)
        assert "2/2" in screen_text(app) and "second words" in screen_text(app)
        app.screen.query_one(TurnView).focus()
        await pilot.press("left")
        await wait_until(pilot, lambda: "first words" in screen_text(app))
        assert "1/2" in screen_text(app)


async def test_a_splice_is_drawn_where_it_acted_and_a_fence_goes_on_after_it() -> None:
    app = bench_app(answers=True)
    async with running(app) as pilot:
        await say(pilot, "x")
        number = app.state.versions()[-1].request_id
        app.engine.emit(p.RequestStarted(number, 9), p.TextDelta(number, "```python\na = 1\n", 6))
        await settled(pilot)
        await pilot.press("tab", "L")
        assert app.engine.of(p.SetMix)[-1].request_ids == (number,)
        app.engine.emit(p.MixSet(last_mix(app), {number: 6}), p.TextDelta(number, "b = 2\n```\n", 9))
        app.engine.emit(p.RequestFinished(number, "stop", stats(9)))
        await settled(pilot)
        shown = screen_text(app)
        assert "── from token 6:" in shown and "pirate ×1.25" in shown
        assert len(app.screen.query("MarkdownFence")) == 2 and "b = 2" in shown


async def test_a_huge_reply_is_plain_text() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "x")
        table = "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 400
        app.engine.emit(p.RequestStarted(1, 9), p.TextDelta(1, table, 900), p.RequestFinished(1, "length", stats(900)))
        await settled(pilot)
        assert not app.screen.query("MarkdownTable") and "max_tokens reached" in screen_text(app)


async def test_escape_stops_and_a_failure_is_told_in_the_chat() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "x")
        app.engine.emit(p.RequestStarted(1, 9), p.TextDelta(1, "half", 1))
        await settled(pilot)
        await pilot.press("escape")
        assert app.engine.of(p.Abort) == [p.Abort(1)]
        app.engine.emit(p.RequestFailed(1, "the prompt has 9000 tokens, the context holds 4096"))
        await settled(pilot)
        assert "9000 tokens" in screen_text(app) and "half" in screen_text(app)


async def test_prompt_history_newlines_and_pastes() -> None:
    app = bench_app("a", "b")
    async with running(app) as pilot:
        prompt = app.screen.query_one(Prompt)
        await say(pilot, "one")
        await say(pilot, "two\nlines")
        await pilot.press("up", "up")
        assert prompt.text == "two\nlines" or prompt.text == "one"
        prompt.clear()
        await pilot.press("a", "ctrl+j", "b")
        assert prompt.text == "a\nb"
        prompt.post_message(events.Paste("x" * 1_000_000))
        await wait_until(pilot, lambda: "977 KiB" in app.state.hint)
        prompt.post_message(events.Paste("\x1b]2;t\x07"))
        await wait_until(pilot, lambda: "␛]2;t␇" in prompt.text)
        assert len(prompt.text) < MAX_PROMPT


async def test_slash_commands_answer_in_the_chat() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "/set temperature 0.7")
        await say(pilot, "/nonsense")
        assert app.control.sampling.temperature == 0.7
        assert "temperature = 0.7" in screen_text(app) and "/nonsense is no command" in screen_text(app)
        for command in ("/clear", "/new"):
            await say(pilot, "/nonsense")
            assert "/nonsense" in screen_text(app)
            await say(pilot, command)
            assert "/nonsense" not in screen_text(app)


async def test_a_message_that_waits_for_the_model_outlives_the_engine() -> None:
    app = bench_app("words", answers=False)
    async with running(app) as pilot:
        await say(pilot, "early")
        app.engine.emit(p.EngineFailed("gone"))
        await settled(pilot)
        assert "waits for the engine" in screen_text(app)
        app.engine.answers = True
        await pilot.press("ctrl+e")
        await wait_until(pilot, lambda: app.state.versions()[0].phase == "done")
        assert app.state.versions()[0].text == "words"


async def test_what_cannot_be_sent_stays_in_the_prompt_and_a_hint_ends_with_the_next_key() -> None:
    app = bench_app()
    async with running(app) as pilot:
        prompt = app.screen.query_one(Prompt)
        send_keys(app, *"hi", "enter", *"next", "enter")
        await wait_until(pilot, lambda: "Esc stops it" in app.state.hint)
        assert prompt.text == "next"
        await pilot.press("x")
        assert app.state.hint == ""
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.state.hint)
        app.engine.emit(p.RequestFinished(1, "stop", stats(1)))
        await settled(pilot)
        assert app.state.hint == "", "the state it spoke of is over"
        await say(pilot, "/nonsense")
        assert prompt.text == "/nonsense"


async def test_ctrl_c_stops_copies_and_never_leaves() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("a", "b", "ctrl+c")
        assert "Ctrl+Q leaves" in app.state.hint
        app.screen.query_one(Prompt).select_all()
        await pilot.press("ctrl+c")
        assert app.state.hint == "copied" and app.clipboard == "ab"
        app.screen.query_one(Prompt).clear()
        await say(pilot, "x")
        app.engine.emit(p.RequestStarted(1, 9), p.TextDelta(1, "half", 1))
        await settled(pilot)
        await pilot.press("ctrl+c", "ctrl+c")
        assert p.Abort(1) in app.engine.of(p.Abort) and app.is_running


async def test_a_path_in_the_prompt_is_no_command_and_says_how_to_load_it() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.screen.query_one(Prompt).text = "/runs/my adapter"
        await pilot.press("enter")
        await settled(pilot)
        assert "looks like a path: /load /runs/my adapter" in app.state.hint and not app.engine.of(p.Generate)

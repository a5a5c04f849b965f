"""aLoRA on the screen: the invocation field, and where an invocation fired."""
from __future__ import annotations

import unicodedata

import pytest
from bench_pilot import bench_app, running, say, screen_text, send_keys, settled, text_of, wait_until
from fake_engine import stats

from lora_bench.engine import protocol as p
from lora_bench.workbench.token_text import marked, span_content, tokens_content
from lora_bench.workbench.widgets.invocation import InvocationField
from lora_bench.workbench.widgets.prompt import Prompt


def found(*tokens: str, before: str = "", after: str = "", start: int = 288) -> p.Activation:
    return p.Activation("certainty", True, start, len(tokens), repr("".join(tokens)), tokens, before, after)


def words(app, where: str = "#invocation Static") -> str:
    """What these texts of the screen say."""
    return " ".join(text_of(widget) for widget in app.screen.query(where) if widget.display)


async def open_field(pilot, draft: str = "") -> InvocationField:
    pilot.app.screen.query_one(Prompt).text = draft
    await pilot.press("tab", "down", "down", "f")
    return pilot.app.screen.query_one(InvocationField)


# -- the field ------------------------------------------------------------------------------------
async def test_what_is_typed_is_cut_into_tokens_and_looked_for_in_the_prompt_as_it_stands() -> None:
    app = bench_app("Paris.")
    async with running(app) as pilot:
        await say(pilot, "Capital of France?")
        field = await open_field(pilot, "is this right")
        field.value = "is this"
        await wait_until(pilot, lambda: app.state.tokenized and app.state.tokenized.found)
        await settled(pilot)
        asked = app.engine.of(p.Tokenize)[-1]
        assert asked.invocation == "is this"
        assert [message.content for message in asked.prompt.messages] == ["Capital of France?", "Paris.", "is this right"]
        assert "2 tokens" in words(app) and "found in this prompt, at token 7" in words(app)
        field.value = "is that it"
        await wait_until(pilot, lambda: app.state.tokenized and not app.state.tokenized.found)
        await settled(pilot)
        assert "not found in this prompt: nearest is [0, 9] at token 4" in words(app)


async def test_a_burst_of_letters_is_one_question_and_late_answers_are_not_shown() -> None:
    app = bench_app()
    app.engine._do_Tokenize = lambda command: None
    async with running(app) as pilot:
        field = await open_field(pilot, "hello")
        before = len(app.engine.of(p.Tokenize))
        send_keys(app, "ctrl+u", *"word")
        await wait_until(pilot, lambda: field.value == "word" and app.engine.of(p.Tokenize)[-1].invocation == "word")
        asked = app.engine.of(p.Tokenize)
        assert len(asked) - before <= 2, "it waits until the person pauses"
        app.engine.emit(p.Tokenized(asked[-1].ask_id - 1, (1,), ("late",), True, 3))
        await settled(pilot)
        assert "late" not in screen_text(app)
        app.engine.emit(p.Tokenized(asked[-1].ask_id, (8,), ("word",), True, 3))
        await settled(pilot)
        assert "found in this prompt, at token 3" in words(app)
        field.value = "words"
        await settled(pilot)
        assert "at token 3" not in words(app), "an answer to another text stays on the screen"


async def test_without_chat_and_message_the_tokens_alone_are_shown() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await open_field(pilot, "/help")
        await wait_until(pilot, lambda: app.state.tokenized)
        await settled(pilot)
        assert app.engine.of(p.Tokenize)[-1].prompt is None and "no chat and no message yet" in words(app)


async def test_the_switch_lets_it_act_in_replies_and_goes_with_the_text() -> None:
    app = bench_app()
    async with running(app) as pilot:
        field = await open_field(pilot)
        field.value = "is it"
        send_keys(app, "ctrl+t", "enter")
        await wait_until(pilot, lambda: app.engine.of(p.SetInvocation))
        assert app.engine.of(p.SetInvocation)[-1] == p.SetInvocation("certainty", "is it", True)
        await settled(pilot)
        assert "also where the model itself" in words(app, "#panel-details") and not field.has_focus
        await pilot.press("f")
        await settled(pilot)
        assert "[x] also where it is generated" in words(app), "it is as it was set"
        await pilot.press("ctrl+t", "escape")
        assert len(app.engine.of(p.SetInvocation)) == 1, "Esc changes nothing"


async def test_an_invocation_that_cannot_be_one_and_a_dead_engine_are_said() -> None:
    app = bench_app()
    app.engine._do_Tokenize = lambda command: app.engine.emit(p.Tokenized(command.ask_id, (), (), detail="it has no tokens in this base"))
    async with running(app) as pilot:
        field = await open_field(pilot)
        await wait_until(pilot, lambda: app.state.tokenized)
        await settled(pilot)
        assert "it has no tokens in this base" in words(app)
        app.engine.emit(p.EngineFailed("killed"))
        field.value = "x"
        await settled(pilot)
        assert "the engine is gone: Ctrl+E" in words(app)


@pytest.mark.parametrize("found", [True, False])
async def test_what_the_engine_says_of_tokens_acts_on_no_terminal(found: bool) -> None:
    evil = "\x1b]2;PWNED\x1b\\ \x9b2J \u202egnp\r\x08 [bold]x[/] \n"
    app = bench_app()
    app.engine._do_Tokenize = lambda command: app.engine.emit(p.Tokenized(command.ask_id, (1, 2), (evil, evil), found, 3, evil))
    async with running(app) as pilot:
        await open_field(pilot, "hello")
        await wait_until(pilot, lambda: app.state.tokenized)
        await settled(pilot)
        assert not [char for char in screen_text(app).replace("\n", "") if unicodedata.category(char) in ("Cc", "Cs") or char == "\u202e"]
        assert "[bold]x[/]" in words(app)


async def test_after_a_restart_invocations_are_set_as_they_were() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.control.set_invocation("certainty", "is it", True)
        await settled(pilot)
        app.engine.emit(p.EngineFailed("killed"))
        await settled(pilot)
        app.control.restart()
        await settled(pilot)
        assert app.engine.of(p.SetInvocation)[1:] == [p.SetInvocation("certainty", "is it", True)]


# -- the transcript -------------------------------------------------------------------------------
async def test_a_reply_shows_where_the_invocation_stands_and_what_of_the_base_was_reused() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "Well, is that right?")
        number = app.state.versions()[-1].request_id
        activation = found("is", " that", before="<|im_start|>user\nWell, ", after=" right?<|im_end|>\n")
        app.engine.emit(p.RequestStarted(number, 312, (activation,), p.CacheUse(312, 288, 18, base_tokens=288)),
                        p.TextDelta(number, "Yes.", 1), p.RequestFinished(number, "stop", stats(1)))
        await settled(pilot)
        said = words(app, ".meter")
        assert "certainty acts from token 288, 288 base tokens reused of 288 before it: …<|im_start|>user⏎Well, ‹is│ that› right?" in said
        assert words(app, ".asked") == "Well, ⚑‹is│ that› right?", "it is marked in what was asked, token by token"


async def test_an_invocation_that_the_model_writes_is_marked_in_its_reply() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "Go on.")
        number = app.state.versions()[-1].request_id
        app.engine.emit(p.RequestStarted(number, 30, (p.Activation("certainty", False, -1, 2, "the prompt has none of [4, 3]"),)),
                        p.TextDelta(number, "Words is it", 4), p.InvocationFired(number, found("is", " it", start=33), 4),
                        p.TextDelta(number, " and more", 6), p.RequestFinished(number, "stop", stats(6)))
        await settled(pilot)
        shown = words(app, ".splice, .meter")
        assert "── ⚑ certainty acts: the model wrote its invocation ──" in shown and "did not act" not in shown
        drawn = screen_text(app)
        assert drawn.index("Words is it") < drawn.index("── ⚑") < drawn.index("and more")
        assert "acts from token 33, where the model wrote it" in shown


@pytest.mark.parametrize(("asked", "activation", "shown"), [
    ("a is it b", found("is", " it", after=" b<|end|>"), "a ⚑‹is│ it› b"),
    ("is it, is it", found("is", " it", after="<|end|>"), "is it, ⚑‹is│ it›"),
    ("is it more", found("is", " it", after="<|assistant|>"), "is it more"),
    ("a is it", found(), "a is it"),
    ("a is it b", p.Activation("c", False, -1, 2, "none"), "a is it b"),
    ("\x1b[31mis it", found("is", " it", after=""), "␛[31m⚑‹is│ it›"),
])
def test_an_invocation_is_marked_in_what_was_asked_only_where_it_was_found(asked: str, activation: p.Activation, shown: str) -> None:
    assert marked(asked, (activation,)).plain == shown


def test_texts_of_tokens_are_cleaned_and_bounded() -> None:
    evil = ("\x1b]0;x\x07", "\u202egnp", "a\nb", "", "[bold]x[/]", *["t"] * 500)
    line = tokens_content(evil).plain
    assert not [char for char in line if unicodedata.category(char) in ("Cc", "Cs") or char == "\u202e"]
    assert "[bold]x[/]" in line and "a⏎b" in line and line.endswith("and 457 more›")
    assert "\x1b" not in span_content(found(*evil, before="\x1b" * 900, after="\x1b" * 900)).plain

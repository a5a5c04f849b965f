"""The main screen under keys, mouse and events of a scripted engine."""
from __future__ import annotations

import random
from time import monotonic

import msgspec
import pytest
from bench_pilot import bench_app, running, say, screen_text, send_keys, settled, wait_until
from fake_engine import report, stats
from textual import events

from lora_bench.engine import protocol as p
from lora_bench.workbench.control import MAX_PROMPT
from lora_bench.workbench.keys import KEYS, bindings
from lora_bench.workbench.panels.turn import TurnView
from lora_bench.workbench.screens.help import HelpScreen
from lora_bench.workbench.state import StartAdapter
from lora_bench.workbench.widgets.adapter_list import AdapterList
from lora_bench.workbench.widgets.ask import AskField
from lora_bench.workbench.widgets.prompt import Prompt


def uses(*pairs: tuple[str, float]) -> p.Mix:
    return tuple(p.AdapterUse(name, scale) for name, scale in pairs)


def last_mix(app) -> p.Mix:
    return app.engine.of(p.SetMix)[-1].mix


# -- chat -----------------------------------------------------------------------------------------
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
        await say(pilot, "/clear")
        assert "/nonsense" not in screen_text(app)


# -- adapters -------------------------------------------------------------------------------------
async def test_keys_of_the_adapter_list() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "right", "right")
        assert app.state.board["pirate"].scale == 0.85
        await pilot.press("shift+left", "ctrl+right")
        assert app.state.board["pirate"].scale == 0.36
        await pilot.press("down", "space")
        assert last_mix(app) == uses(("pirate", 0.36))
        await pilot.press("s")
        assert last_mix(app) == uses(("json", 0.3)) and "solo: json" in screen_text(app)
        await pilot.press("m")
        assert last_mix(app) == () and "BYPASSED" in screen_text(app)
        await pilot.press("m", "s", "u", "0", "1", "p")
        assert app.engine.of(p.PinAdapter) == [p.PinAdapter("json", True)]


async def test_a_typed_scale_is_checked_in_place() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "enter", "x", "enter")
        await pilot.pause()
        assert "a scale is a number" in screen_text(app) and app.state.board["pirate"].scale == 0.75
        await pilot.press("end", "backspace", "minus", "1", ".", "2", "5", "enter")
        await settled(pilot)
        assert app.state.board["pirate"].scale == -1.25 and isinstance(app.screen.focused, AdapterList)
        await pilot.press("=", "9", "escape")
        assert app.state.board["pirate"].scale == -1.25


async def test_the_mouse_toggles_and_drags() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.click(AdapterList, offset=(2, 1))
        await settled(pilot)
        assert not app.state.board["json"].on
        name_width, bar_width = app.screen.query_one(AdapterList)._widths()
        start = 1 + 4 + name_width + 1
        await pilot.mouse_down(AdapterList, offset=(start, 0))
        await pilot.hover(AdapterList, offset=(start + bar_width - 1, 0))
        await pilot.mouse_up(AdapterList, offset=(start + bar_width - 1, 0))
        await settled(pilot)
        assert app.state.board["pirate"].scale == 2.0
        app.state.board.undo()
        assert app.state.board["pirate"].scale == 0.75, "one drag is one change"


async def test_adapters_are_added_by_pasted_paths(tmp_path) -> None:
    app = bench_app()
    spaced = tmp_path / "with space"
    spaced.mkdir()
    (tmp_path / "plain").mkdir()
    async with running(app) as pilot:
        await pilot.press("tab", "a")
        field = app.screen.query_one("#ask-field")
        field.value = "/no/such/place"
        await pilot.press("enter")
        await pilot.pause()
        assert "does not exist" in screen_text(app)
        field.value = f"'{spaced}' file://{tmp_path}/plain"
        await pilot.press("enter")
        await settled(pilot)
        assert [c.path for c in app.engine.of(p.LoadAdapter)[-2:]] == [str(spaced), f"{tmp_path}/plain"]
        assert "plain" in app.state.board.names


async def test_unloading_what_acts_needs_a_second_key() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "x")
        await pilot.pause()
        assert not app.engine.of(p.UnloadAdapter) and "x again" in screen_text(app)
        await pilot.press("x")
        await settled(pilot)
        assert app.state.board.names == ["json", "certainty"]


async def test_invocation_is_set_shown_and_invoked() -> None:
    app = bench_app("Paris.", "sure")
    async with running(app) as pilot:
        await say(pilot, "Capital?")
        await pilot.press("tab", "down", "down", "f")
        app.screen.query_one("#ask-field").value = "is this right"
        await pilot.press("enter")
        await settled(pilot)
        assert "is this right = 3 tok: 0 1 2" in screen_text(app)
        await pilot.press("v")
        await settled(pilot)
        assert app.engine.of(p.Generate)[-1].prompt.opening == "is this right"
        assert "certainty on this chat (not part of it)" in screen_text(app).replace("\n", " ") or "⚑ certainty" in screen_text(app)


# -- from pane to pane ------------------------------------------------------------------------------
async def idle(pilot) -> None:
    """Nothing runs, nor did a moment ago: Esc changes panes."""
    await wait_until(pilot, lambda: not pilot.app.screen.check_action("stop", ()))


async def test_escape_goes_to_the_adapters_and_back_and_keys_follow_at_once() -> None:
    app = bench_app("words")
    async with running(app) as pilot:
        prompt = app.screen.query_one(Prompt)
        await idle(pilot)
        send_keys(app, "n", "o", "t", "escape", "j", "space", "escape", "x", "j")
        await wait_until(pilot, lambda: prompt.text == "notxj")
        assert not app.state.board["json"].on
        send_keys(app, "tab", "enter", *"0.5", "enter", "shift+tab", "z")
        await wait_until(pilot, lambda: prompt.text == "notxjz")
        await wait_until(pilot, lambda: app.state.board["json"].scale == 0.5)


async def test_a_burst_of_keys_acts_in_its_order() -> None:
    app = bench_app("a")
    async with running(app) as pilot:
        prompt = app.screen.query_one(Prompt)
        send_keys(app, *"one", "ctrl+j", *"two", "ctrl+u", *"six", "ctrl+a", "x", "enter", *"next")
        await wait_until(pilot, lambda: prompt.text == "next")
        await wait_until(pilot, lambda: app.engine.of(p.Generate))
        assert app.engine.of(p.Generate)[-1].prompt.messages[-1].content == "one\nxsix"
        await pilot.press("ctrl+u", "tab")
        send_keys(app, "enter", *"9", "ctrl+u", *"0.25", "enter", "j", "space", "escape")
        await wait_until(pilot, lambda: app.state.board["pirate"].scale == 0.25 and not app.state.board["json"].on)


async def test_tab_goes_by_panes_not_by_replies() -> None:
    app = bench_app("a", "b")
    async with running(app) as pilot:
        await say(pilot, "one")
        await say(pilot, "two")
        seen = []
        for _ in range(4):
            await pilot.press("tab")
            seen.append(type(app.screen.focused).__name__)
        assert seen == ["AdapterList", "TurnView", "Prompt", "AdapterList"]
        await pilot.press("f9")
        assert isinstance(app.screen.focused, Prompt), "the pane that had the focus is folded"


async def test_escape_right_after_a_reply_ended_does_not_move_the_focus() -> None:
    app = bench_app("words")
    async with running(app) as pilot:
        await say(pilot, "x")
        app.screen._ended_at = monotonic() + 100
        await pilot.press("escape")
        assert isinstance(app.screen.focused, Prompt) and not app.engine.of(p.Abort)


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


async def test_letters_typed_while_the_screen_is_too_small_stand_in_the_prompt_later() -> None:
    app = bench_app()
    async with running(app, 20, 5) as pilot:
        await pilot.press("h", "i")
        await pilot.resize_terminal(100, 30)
        await settled(pilot)
        assert app.screen.query_one(Prompt).text == "hi"
        await pilot.press("g")
        assert app.screen.query_one(Prompt).text == "hig"


async def test_an_alora_that_is_switched_on_says_what_makes_it_act() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "down", "down", "space")
        await settled(pilot)
        assert "acts only after its invocation: v invokes it" in app.state.hint
        assert "aLoRA" in screen_text(app) and "acts only after its" in screen_text(app)


async def test_a_load_says_what_is_happening_before_the_engine_does() -> None:
    app = bench_app(answers=False)
    async with running(app) as pilot:
        await settled(pilot)
        shown = screen_text(app)
        assert "The engine is starting" in shown and "3 adapters to read" in shown and "Ctrl+O" not in shown
        app.engine.emit(p.ModelLoading("download", "x.whl", 31 << 20, 93 << 20))
        await settled(pilot)
        shown = screen_text(app)
        assert "33%" in shown and "31.0 MiB of 93.0 MiB" in shown and "Esc cancels" in shown


async def test_a_folder_of_adapters_adds_each_and_the_cursor_goes_to_the_first(tmp_path) -> None:
    for step in ("checkpoint-400", "checkpoint-800"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "adapter_config.json").write_text("{}")
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "a")
        app.screen.query_one("#ask-field").value = str(tmp_path)
        await pilot.press("enter")
        await wait_until(pilot, lambda: "checkpoint-800" in app.state.board.names)
        await settled(pilot)
        assert app.screen.query_one(AdapterList).current.name == "checkpoint-400"


async def test_a_field_says_when_a_paste_is_too_long_and_makes_lines_one() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "a")
        field = app.screen.query_one(AskField)
        field.post_message(events.Paste("x" * 1_000_000))
        await wait_until(pilot, lambda: app._notifications)
        assert field.value == "" and "977 KiB" in next(iter(app._notifications)).message
        field.post_message(events.Paste("/a/b\n/c/\x1b]2;d"))
        await wait_until(pilot, lambda: field.value == "/a/b /c/␛]2;d")


async def test_help_opens_everywhere_and_explains_the_words() -> None:
    app = bench_app()
    async with running(app, 160, 100) as pilot:
        await pilot.press("f4", "f1")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen) and "Engine screen" in screen_text(app) and "‖ΔW‖" in screen_text(app)


# -- the rest of the screen -----------------------------------------------------------------------
async def test_the_engine_dies_and_is_started_again_from_its_card() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "x")
        app.engine.emit(p.RequestStarted(1, 9), p.TextDelta(1, "half a", 2))
        app.engine.emit(p.EngineFailed("the engine process is gone: it was killed by signal 9, SIGKILL"))
        await settled(pilot)
        shown = screen_text(app)
        assert "engine gone" in shown and "half a" in shown and "SIGKILL" in shown and "Ctrl+E" in shown
        app.screen.query(".engine").last().focus()
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.state.engine == "idle" and not app.state.wanted)
        assert app.engine.starts == 2 and last_mix(app) == uses(("pirate", 0.75), ("json", 0.3))


async def test_a_load_that_fails_opens_the_load_screen() -> None:
    app = bench_app(answers=False)
    async with running(app) as pilot:
        app.engine.emit(p.ModelLoading("weights", "layers.0", 5, 10))
        await settled(pilot)
        assert "50%" in screen_text(app)
        await pilot.press("escape")
        assert app.engine.of(p.CancelLoad)
        app.engine.emit(p.ModelFailed("smol.gguf: the architecture is mamba, llama was expected"))
        await wait_until(pilot, lambda: type(app.screen).__name__ == "LoadScreen")
        await pilot.pause()
        assert "mamba" in screen_text(app)


def test_every_binding_has_an_id_of_its_own_and_a_line_of_help() -> None:
    ids = [binding.id for pane in KEYS for binding in bindings(pane)]
    assert len(ids) == len(set(ids)) and all(ids)
    assert all(key.help and key.label for keys in KEYS.values() for key in keys)
    others = [binding for owner in (AskField, HelpScreen) for binding in owner.BINDINGS]
    assert all(binding.id and binding.tooltip for binding in others)


async def test_every_binding_of_the_screen_is_in_the_palette_and_does_what_it_says() -> None:
    app = bench_app("words")
    async with running(app) as pilot:
        await say(pilot, "x")
        await idle(pilot)
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        for pane in app.screen.PALETTE_PANES:
            for key in KEYS[pane]:
                acts = pane != "bench" or key.action not in ("stop", "focus_prompt")  # Esc does one of three things
                assert (f"{key.help}  ({key.keys})" in commands) == acts
        await next(command for title, command in commands.items() if title.endswith("(m)")).callback()
        await settled(pilot)
        assert last_mix(app) == ()


async def test_help_speaks_of_the_focused_pane_first() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "f1")
        await pilot.pause()
        assert "Switch the adapter on or off" in screen_text(app)
        await pilot.press("escape", "f4")
        await settled(pilot)
        assert "EVENTS" in screen_text(app)
        await pilot.press("escape")
        assert app.screen.query(Prompt)


async def test_resizing_while_streaming(seed_number: int) -> None:
    app = bench_app()
    rng = random.Random(seed_number)
    async with running(app) as pilot:
        await say(pilot, "x")
        app.engine.emit(p.RequestStarted(1, 9))
        for count in range(8):
            app.engine.emit(p.TextDelta(1, rng.choice(["word ", "```\n", "| a | b |\n", "\n\n", "**x** "]), count))
            await pilot.resize_terminal(rng.randint(10, 200), rng.randint(4, 60))
            await app.show()
        await pilot.resize_terminal(19, 30)
        await pilot.pause()
        assert "terminal too" in screen_text(app)
        await pilot.resize_terminal(80, 24)
        await settled(pilot)
        assert "slots" in screen_text(app)


async def test_any_keys_in_any_order(seed_number: int, tmp_path) -> None:
    app = bench_app(*["some words"] * 40)
    rng = random.Random(seed_number)
    keys = [name for pane in KEYS for key in KEYS[pane] for name in key.keys.split(",") if name != "ctrl+q"]
    async with running(app, 100, 30) as pilot:
        for _ in range(40):
            await pilot.press(rng.choice([*keys, "tab", "x", "5", "ctrl+p", "pagedown", "home", "backspace"]))
        assert app.is_running


@pytest.fixture
def seed_number() -> int:
    number = random.SystemRandom().randrange(1 << 31)
    print(f"seed {number}")
    return number


async def test_narrow_screens_lay_the_adapters_over_the_chat() -> None:
    app = bench_app()
    async with running(app, 50, 20) as pilot:
        assert "ADAPTERS" not in screen_text(app)
        await pilot.press("f9")
        await settled(pilot)
        assert "ADAPTERS" in screen_text(app)
        await pilot.press("f9")
        await settled(pilot)
        assert "ADAPTERS" not in screen_text(app)


async def test_a_wide_screen_after_a_narrow_one_has_all_panels_again() -> None:
    app = bench_app()
    async with running(app, 50, 20) as pilot:
        await pilot.press("tab")
        await settled(pilot)
        assert "ADAPTERS" in screen_text(app)
        await pilot.resize_terminal(120, 36)
        await settled(pilot)
        assert "ADAPTERS" in screen_text(app) and "SLOTS" in screen_text(app)
        await pilot.press("f9")
        await settled(pilot)
        assert "ADAPTERS" not in screen_text(app) and "SLOTS" not in screen_text(app)


async def test_hundreds_of_adapters_scroll_under_the_cursor() -> None:
    app = bench_app(adapters=tuple(StartAdapter(f"/a/a{i:03}", on=False) for i in range(300)))
    async with running(app, 80, 24) as pilot:
        await pilot.press("tab")
        app.screen.query_one(AdapterList).move(250)
        await settled(pilot)
        assert "▸a250" in screen_text(app)
        await pilot.press("space")
        assert last_mix(app) == uses(("a250", 1.0))


# -- details and checks ---------------------------------------------------------------------------
async def test_details_check_the_adapter_once_and_an_effect_run_is_kept() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "i")
        await wait_until(pilot, lambda: "FIELDS OF ITS CONFIG" in screen_text(app))
        assert app.engine.of(p.CheckAdapter) == [p.CheckAdapter("pirate", False)]
        shown = screen_text(app)
        for part in ("pirate: usable, 1 warning", "! it was trained on another base", "‖ΔW‖ / ‖W‖", "layer 29", "not run yet: F5",
                     "✓ r = 16"):
            assert part in shown, part
        await pilot.press("f5")
        await wait_until(pilot, lambda: "22.8% of 162 likeliest tokens change" in screen_text(app))
        assert "'I' → 'Arr'" in screen_text(app)
        await pilot.press("escape")
        await settled(pilot)
        assert "23% of" in screen_text(app) and any("pirate checked: usable, 1 warning" in entry.text for entry in app.state.events)
        await pilot.press("i")
        await settled(pilot)
        assert len(app.engine.of(p.CheckAdapter)) == 2 and "'I' → 'Arr'" in screen_text(app)


async def test_a_check_that_waits_fails_or_is_of_old_content_says_so() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.engine._do_CheckAdapter = lambda command: None
        await pilot.press("tab", "f5")
        await settled(pilot)
        assert app.engine.of(p.CheckAdapter) == [p.CheckAdapter("pirate", True)] and "being checked: waits for its turn" in screen_text(app)
        app.engine.emit(p.CheckProgress("pirate", "compares: chat"))
        await settled(pilot)
        assert "being checked: compares: chat" in screen_text(app)
        app.engine.emit(p.CheckFailed("pirate", "memory ran out: [/x] \x1b]2;owned"))
        await settled(pilot)
        assert "✗ memory ran out: [/x] ␛]2;owned" in screen_text(app) and len(app.engine.of(p.CheckAdapter)) == 1
        app.engine.emit(p.CheckFinished("pirate", report(app.state.adapters["pirate"], True)))
        await settled(pilot)
        assert "22.8%" in screen_text(app)
        changed = msgspec.structs.replace(app.state.adapters["pirate"], digest="00" * 32)
        app.engine.emit(p.AdapterChanged(changed))
        await settled(pilot)
        assert app.engine.of(p.CheckAdapter)[-1] == p.CheckAdapter("pirate", False) and "22.8%" not in screen_text(app)


async def test_the_header_and_the_first_lines_say_that_a_check_runs() -> None:
    app = bench_app()
    async with running(app, 80, 24) as pilot:
        app.engine._do_CheckAdapter = lambda command: None
        await pilot.press("tab", "f5")
        app.engine.emit(p.CheckProgress("pirate", "compares: chat"))
        await settled(pilot)
        lines = screen_text(app).splitlines()
        assert lines[0].rstrip().endswith("engine checks pirate") and any("being checked: compares: chat" in line for line in lines[:8])
        app.engine.emit(p.CheckFinished("pirate", report(app.state.adapters["pirate"], True)))
        await settled(pilot)
        lines = screen_text(app).splitlines()
        assert lines[0].rstrip().endswith("engine idle") and any("22.8%" in line for line in lines[:12])


async def test_no_key_of_the_footer_is_cut_off_and_a_wide_one_has_all() -> None:
    app = bench_app()
    async with running(app, 80, 24) as pilot:
        await pilot.press("tab")
        for width, missing in ((80, "Value"), (60, "Solo"), (160, "")):
            await pilot.resize_terminal(width, 30)
            await wait_until(pilot, lambda missing=missing: ("Value" in (last := screen_text(app).splitlines()[-1])) is not bool(missing)
                             and "Prompt" in last)
            last = screen_text(app).splitlines()[-1]
            assert "palette" in last and "On/off" in last and (missing == "" or missing not in last)
            whole = [key for key in app.screen.query("FooterKey") if not key.has_class("-command-palette")]
            assert all(key.region.right <= app.screen.query_one(".-command-palette").region.x for key in whole)
            await pilot.pause(0.3)
            assert list(app.screen.query("FooterKey"))[:1] == whole[:1], "it is made again without end"


async def test_a_path_in_the_prompt_is_no_command_and_says_how_to_load_it() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.screen.query_one(Prompt).text = "/runs/my adapter"
        await pilot.press("enter")
        await settled(pilot)
        assert "looks like a path: /load /runs/my adapter" in app.state.hint and not app.engine.of(p.Generate)


async def test_loads_that_one_stop_ends_are_one_notice() -> None:
    app = bench_app()
    async with running(app) as pilot:
        for number in range(300):
            app.engine.emit(p.AdapterFailed("", f"/a/x{number}", f"/a/x{number}: loading was cancelled", cancelled=True))
            if number == 0:
                await settled(pilot)
                assert "adapter x0 was not" in screen_text(app)
        await settled(pilot)
        assert "x0, x1, x2 and 297 more" in screen_text(app) and len(app.state.items) == 1


async def test_paths_of_nobody_are_not_there() -> None:
    app = bench_app()
    async with running(app):
        assert app.control.add_paths("~nobody-of-that-name/x") == "~nobody-of-that-name/x does not exist"


async def test_a_prompt_prefix_is_offered_and_never_applied_unasked() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await pilot.press("tab", "i")
        assert not app.screen.check_action("insert_prefix", ()) and not app.screen.check_action("system_prefix", ())
        info = msgspec.structs.replace(app.state.adapters["pirate"], prompt_prefix="Speak like a pirate.\n", digest="11" * 32)
        app.engine.adapters["pirate"] = info
        app.engine.emit(p.AdapterChanged(info))
        await settled(pilot)
        assert "expects before a prompt" in screen_text(app) and app.control.system == "" and not app.engine.of(p.Generate)
        await pilot.press("p")
        await settled(pilot)
        assert app.screen.query_one(Prompt).text == "Speak like a pirate.\n" and app.control.system == ""
        await pilot.press("tab", "i", "s")
        await settled(pilot)
        assert app.control.system == "Speak like a pirate.\n" and "/system alone" in app.state.hint

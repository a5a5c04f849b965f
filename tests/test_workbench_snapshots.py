"""Pictures of the screens. After a wanted change: pytest tests/test_workbench_snapshots.py --snapshot-update, and look at the diff."""
from __future__ import annotations

import pytest
import textual
from bench_pilot import bench_app, say, screen_text, settled, wait_until
from fake_engine import stats
from textual.pilot import Pilot
from textual.widgets import TextArea

from lora_bench.engine import protocol as p
from lora_bench.workbench.screens.details import DetailsScreen
from lora_bench.workbench.screens.engine import EngineScreen
from lora_bench.workbench.screens.trace import TraceScreen
from lora_bench.workbench.widgets.invocation import InvocationField

MADE_WITH = "8.2.8"
pytestmark = pytest.mark.skipif(textual.__version__ != MADE_WITH, reason=f"the pictures were made with textual {MADE_WITH}")
REPLY = "Arr, **silicon** seas roar,\nwarps set sail in lockstep, arr —\n\n```python\nprint('aye')\n```\n- one\n- two"


async def a_chat(pilot: Pilot) -> None:
    """A finished reply under a spliced mix, then one line of help."""
    app = pilot.app
    await wait_until(pilot, lambda: app.state.model and not app.state.wanted and app.screen.query(TextArea))
    app.screen.query_one(TextArea).cursor_blink = False
    await say(pilot, "A haiku about GPUs?")
    await wait_until(pilot, lambda: not app.state.running)
    app.state.board.set_scale("pirate", -0.5)
    app.control.send_mix()
    await say(pilot, "And the sea?")
    number = app.state.versions()[-1].request_id
    mix = app.state.mix()
    activation = p.Activation("certainty", False, -1, 3, "nearest: «<|jud» at token 4")
    missed = p.MissedRun(288, 1, "mix differs", "pirate ×0.75 then, ×-0.5 now"), p.MissedRun(304, 1, "new tokens")
    cache = p.CacheUse(312, 288, 18, missed_blocks=2, missed=missed, llama_cpp_cleared=19)
    app.engine.emit(p.CacheCleared(4, "adapter sql was unloaded"), p.RequestStarted(number, 312, (activation,), cache),
                    p.TextDelta(number, "The sea be", 3))
    await settled(pilot)
    app.engine.emit(p.MixSet(mix[:1], {number: 3}), p.TextDelta(number, " wide.", 5), p.RequestFinished(number, "stop", stats(5)))
    await settled(pilot)
    await pilot.press("tab")
    await wait_until(pilot, lambda: not app.screen.check_action("stop", ()))
    await settled(pilot)


async def a_death(pilot: Pilot) -> None:
    await a_chat(pilot)
    cause = "the engine process is gone: it was killed by signal 9, SIGKILL (out of memory, or killed by hand)"
    pilot.app.engine.emit(p.EngineFailed(cause))
    await settled(pilot)


async def the_engine_screen(pilot: Pilot) -> None:
    await a_chat(pilot)
    await pilot.press("f4")
    await wait_until(pilot, lambda: isinstance(pilot.app.screen, EngineScreen))
    await settled(pilot)


async def a_trace(pilot: Pilot) -> None:
    await the_engine_screen(pilot)
    await pilot.press("t")
    await wait_until(pilot, lambda: isinstance(pilot.app.screen, TraceScreen) and pilot.app.state.trace)
    await settled(pilot)


async def the_invocation_field(pilot: Pilot) -> None:
    """An invocation that the message of the chat has, and one that is typed and that it has not."""
    app = pilot.app
    await wait_until(pilot, lambda: app.state.model and not app.state.wanted and app.screen.query(TextArea))
    app.screen.query_one(TextArea).cursor_blink = False
    await say(pilot, "Well, is that right?")
    number = app.state.versions()[-1].request_id
    activation = p.Activation("certainty", True, 27, 2, "'is that'", ("is", " that"), "<|im_start|>user\nWell, ", " right?<|im_end|>\n")
    cache = p.CacheUse(34, 27, 1, 11, 2, (p.MissedRun(27, 2, "new tokens"),), base_tokens=27)
    app.engine.emit(p.RequestStarted(number, 34, (activation,), cache),
                    p.TextDelta(number, "Yes.", 1), p.RequestFinished(number, "stop", stats(1)))
    await settled(pilot)
    await pilot.press("tab", "down", "down", "f")
    field = app.screen.query_one(InvocationField)
    field.cursor_blink = False
    field.value = "is this so"
    await wait_until(pilot, lambda: app.state.tokenized and app.engine.of(p.Tokenize)[-1].invocation == "is this so")
    await wait_until(pilot, lambda: not app.screen.check_action("stop", ()))
    await settled(pilot)


async def the_details(pilot: Pilot) -> None:
    await wait_until(pilot, lambda: pilot.app.state.model and not pilot.app.state.wanted)
    await settled(pilot)
    await pilot.press("tab", "f5")
    await wait_until(pilot, lambda: isinstance(pilot.app.screen, DetailsScreen) and "'Arr'" in screen_text(pilot.app))
    await settled(pilot)


LEFT = "Silicon seas roar,\nwarps set sail in lockstep, arr —\ncache lines guard the shore."
RIGHT = "Silicon dreams roar,\nwarps set sail in lockstep now —\ncache lines guard the core."


async def a_comparison(pilot: Pilot) -> None:
    """Two finished replies with their figures, the cursor on a difference."""
    app = pilot.app
    await wait_until(pilot, lambda: app.state.model and not app.state.wanted and app.screen.query(TextArea))
    await pilot.press("f3")
    await settled(pilot)
    app.screen.query_one(TextArea).cursor_blink = False
    await say(pilot, "A haiku about GPUs?")
    await wait_until(pilot, lambda: app.control.comparing.compare.run.scored)
    await pilot.press("tab", "right", "n", "n")
    await settled(pilot)


async def its_tokens(pilot: Pilot) -> None:
    await a_comparison(pilot)
    await pilot.press("k", "n")
    await settled(pilot)


async def its_mix(pilot: Pilot) -> None:
    await a_comparison(pilot)
    await pilot.press("m", "space")
    await settled(pilot)


async def a_blind_pair(pilot: Pilot) -> None:
    pilot.app.control.comparing.compare.blind = True
    await a_comparison(pilot)


async def a_sweep(pilot: Pilot) -> None:
    app = pilot.app
    app.engine.replies.extend([LEFT, RIGHT, LEFT, RIGHT, LEFT])
    await a_comparison(pilot)
    await pilot.press("w", "enter")
    await wait_until(pilot, lambda: (sweep := app.control.comparing.compare.sweep) and sweep.scored and app.screen.id == "sweep-screen")
    await pilot.press("down", "down")
    await settled(pilot)


@pytest.mark.parametrize("size", [(160, 45), (120, 36), (80, 24)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_main_screen(snap_compare, size: tuple[int, int]) -> None:
    assert snap_compare(bench_app(REPLY), terminal_size=size, run_before=a_chat)


def test_main_screen_without_colour(snap_compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(bench_app(REPLY), terminal_size=(120, 36), run_before=a_chat)


def test_dead_engine(snap_compare) -> None:
    assert snap_compare(bench_app(REPLY), terminal_size=(120, 36), run_before=a_death)


def test_engine_screen(snap_compare) -> None:
    assert snap_compare(bench_app(REPLY), terminal_size=(120, 36), run_before=the_engine_screen)


def test_trace_screen(snap_compare) -> None:
    assert snap_compare(bench_app(REPLY), terminal_size=(80, 24), run_before=a_trace)


@pytest.mark.parametrize("size", [(120, 36), (80, 24)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_invocation_field(snap_compare, size: tuple[int, int]) -> None:
    assert snap_compare(bench_app(), terminal_size=size, run_before=the_invocation_field)


@pytest.mark.parametrize("size", [(120, 36), (80, 24)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_details_screen(snap_compare, size: tuple[int, int]) -> None:
    assert snap_compare(bench_app(REPLY), terminal_size=size, run_before=the_details)


@pytest.mark.parametrize("size", [(120, 36), (80, 24)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_compare_screen(snap_compare, size: tuple[int, int]) -> None:
    assert snap_compare(bench_app(LEFT, RIGHT), terminal_size=size, run_before=a_comparison)


def test_compare_screen_without_colour(snap_compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(bench_app(LEFT, RIGHT), terminal_size=(100, 30), run_before=a_comparison)


@pytest.mark.parametrize("view", [its_tokens, its_mix, a_blind_pair, a_sweep])
def test_views_of_a_comparison(snap_compare, view) -> None:
    assert snap_compare(bench_app(LEFT, LEFT if view is a_blind_pair else RIGHT, *[RIGHT, LEFT]), terminal_size=(100, 30), run_before=view)

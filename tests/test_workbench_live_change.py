"""What a change of the mix does to a reply that is being written: the setting, what is sent, what the transcript says."""
from __future__ import annotations

from pathlib import Path

import pytest
import tomlkit
from bench_pilot import bench_app, running, say, screen_text, settled, text_of, uses, wait_until
from fake_engine import stats
from textual.pilot import Pilot

from lora_bench.engine import protocol as p
from lora_bench.workbench.live_change import splice_text
from lora_bench.workbench.paths import settings_file
from lora_bench.workbench.settings import keep_change, read_settings
from lora_bench.workbench.transcript import Splice, Version

A, B, C = uses(("a", 0.7)), uses(("a", 0.8)), uses(("a", 0.9))


async def a_running_reply(pilot: Pilot) -> int:
    await say(pilot, "Go on.")
    number = pilot.app.state.versions()[-1].request_id
    pilot.app.engine.emit(p.RequestStarted(number, 31), p.TextDelta(number, "The sea", 2))
    await settled(pilot)
    return number


def rescale(app, scale: float) -> p.Mix:
    """As by the scale bar, while the engine takes its time."""
    app.state.board.set_scale("pirate", scale)
    app.control.send_mix()
    return app.state.mix()


async def test_a_key_goes_through_the_ways_and_the_choice_is_kept() -> None:
    app = bench_app()
    async with running(app) as pilot:
        assert "●splice ○recompute ○finish" in screen_text(app)
        await pilot.press("tab", "c")
        await settled(pilot)
        assert "○splice ●recompute ○finish" in screen_text(app) and "recompute: a change of the mix" in app.state.hint
        await pilot.press("c")
        await settled(pilot)
        assert read_settings(settings_file())[0].live_change == "finish"
    again = bench_app()
    async with running(again) as pilot:
        await settled(pilot)
        assert again.state.change == "finish" and "●finish" in screen_text(again)
        await pilot.press("tab", "c")
        assert again.state.change == "splice"


async def test_the_line_of_the_setting_takes_clicks() -> None:
    app = bench_app()
    async with running(app, 80, 24) as pilot:
        await pilot.click("#adapters-change")
        await settled(pilot)
        assert app.state.change == "recompute" and "●recompute" in screen_text(app)


async def test_the_slash_command_sets_it_says_it_and_refuses_other_words() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "/change finish")
        assert app.state.change == "finish" and "the reply ends under the mix that it has" in app.state.items[-1].text
        await say(pilot, "/change")
        assert app.state.items[-1].text.startswith("finish:")
        await say(pilot, "/change sideways")
        assert "there are splice, recompute, finish" in app.state.hint and app.state.change == "finish"


@pytest.mark.parametrize("change", ["splice", "recompute"])
async def test_a_change_is_sent_with_the_way_and_the_transcript_says_which(change: str) -> None:
    app = bench_app(answers=True)
    app.engine._do_SetMix = lambda command: None
    async with running(app) as pilot:
        number = await a_running_reply(pilot)
        app.control.set_change(change)
        mix = rescale(app, 0.5)
        assert app.engine.of(p.SetMix)[-1] == p.SetMix(mix, (number,), change)
        app.control.set_change("finish")  # what was sent before keeps its way
        app.engine.emit(p.MixSet(mix, {number: 2}, {}, {number: 33} if change == "recompute" else {}), p.TextDelta(number, " is wide.", 5))
        await settled(pilot)
        reply = app.state.versions()[-1]
        assert [(s.at, s.token, s.change, s.after) for s in reply.splices] == [(7, 2, change, mix)] and reply.mix_now == mix
        ending = "· spliced ──" if change == "splice" else "· recomputed: 33 tokens ──"
        assert text_of(app.screen.query_one(".splice")).endswith(ending)


async def test_a_reply_that_finishes_first_says_so_and_keeps_its_mix() -> None:
    app = bench_app()
    app.engine._do_SetMix = lambda command: None
    async with running(app) as pilot:
        number = await a_running_reply(pilot)
        app.control.set_change("finish")
        before = app.state.versions()[-1].mix
        for scale in (0.8, 0.85, 0.9):  # a drag: the last of them counts
            app.engine.emit(p.MixSet(rescale(app, scale), {}))
            await settled(pilot)
        app.engine.emit(p.TextDelta(number, " is wide.", 5), p.RequestFinished(number, "stop", stats(5)))
        await settled(pilot)
        reply = app.state.versions()[-1]
        assert reply.mix_now == before and [splice.after for splice in reply.splices] == [app.state.mix()]
        line = text_of(app.screen.query_one(".splice"))
        assert "pirate ×0.90 + json ×0.30 was set; this reply finishes under pirate ×0.75 + json ×0.30" in line
        assert "→" not in text_of(app.screen.query_one(".reply-head"))


async def test_a_change_that_is_taken_back_before_the_reply_ends_leaves_nothing() -> None:
    app = bench_app()
    app.engine._do_SetMix = lambda command: None
    async with running(app) as pilot:
        await a_running_reply(pilot)
        app.control.set_change("finish")
        app.engine.emit(p.MixSet(rescale(app, 0.9), {}))
        await settled(pilot)
        app.engine.emit(p.MixSet(rescale(app, 0.75), {}))
        await settled(pilot)
        assert not app.state.versions()[-1].splices
        await wait_until(pilot, lambda: not app.screen.query(".splice"))


def test_what_a_recomputed_change_found_ready_is_said() -> None:
    assert splice_text(Splice(0, 3, A, B, "recompute")).endswith("a ×0.70 → a ×0.80 · recomputed: nothing, all of it was there ──")


# -- the settings file ----------------------------------------------------------------------------
def test_the_choice_is_put_before_the_tables_and_all_else_stays(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('# mine\n\n[[recent]]\npath = "/m" # a comment\nname = "m"\nused = 2026-01-02T03:04:05Z\n')
    assert keep_change(file, "finish") == "" and keep_change(file, "recompute") == ""
    text = file.read_text()
    assert "# mine" in text and "# a comment" in text
    assert tomlkit.parse(text)["live_change"] == "recompute"
    settings, note = read_settings(file)
    assert (settings.live_change, len(settings.recent), note) == ("recompute", 1, "")


def test_a_way_that_there_is_not_puts_the_file_aside_and_is_said(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('live_change = "sideways"\n')
    settings, note = read_settings(file)
    assert settings.live_change == "splice" and "damaged" in note and (tmp_path / "settings.toml.damaged").exists()


async def test_a_choice_that_cannot_be_kept_acts_and_is_said() -> None:
    settings_file().parent.mkdir(parents=True)
    app = bench_app()
    async with running(app) as pilot:
        settings_file().unlink(missing_ok=True)
        settings_file().mkdir()
        await pilot.press("tab", "c")
        await settled(pilot)
        assert app.state.change == "recompute" and "is not kept for the next start" in app.state.items[-1].text


def a_version() -> Version:
    return Version(1, (), A, p.Sampling())


@pytest.mark.parametrize("change", ["splice", "recompute"])
def test_mixes_under_which_no_token_was_made_leave_no_mark(change: p.MixChange) -> None:
    version = a_version()
    version.take_change(Splice(3, 2, A, B, change, 40))
    version.take_change(Splice(3, 2, B, C, change, 33))
    assert version.splices == [Splice(3, 2, A, C, change, 33)] and version.mix_now == C
    version.take_change(Splice(9, 4, C, B, change, 35))
    assert [splice.token for splice in version.splices] == [2, 4]


def test_a_splice_that_is_taken_back_before_the_next_token_was_none_but_a_recompute_was() -> None:
    version = a_version()
    version.take_change(Splice(3, 2, A, B))
    version.take_change(Splice(3, 2, B, A))
    assert not version.splices and version.mix_now == A
    version.take_change(Splice(3, 2, A, B, "recompute", 40))
    version.take_change(Splice(3, 2, B, A, "recompute", 40))
    assert len(version.splices) == 2 and version.mix_now == A

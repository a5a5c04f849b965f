"""KV memory on the screen: its map, its words, what the transcript and the log say of it."""
from __future__ import annotations

import random
import re

import pytest
from bench_pilot import bench_app, running, say, screen_text, settled, text_of, uses, wait_until
from fake_engine import stats

from lora_bench.engine import protocol as p
from lora_bench.workbench.cache_text import found_text, hit_text, prefix_text, started_text
from lora_bench.workbench.happenings import event_line
from lora_bench.workbench.kv_map import map_lines, scale_text
from lora_bench.workbench.mix_letters import OTHERS, MixLetters
from lora_bench.workbench.screens.engine import EngineScreen

A, B, C = (), uses(("pirate", 0.75)), uses(("json", 0.3))


def view(*runs: p.KvRun, mixes: tuple[p.Mix, ...] = (A, B, C)) -> p.KvView:
    blocks = max((run.first + run.count for run in runs), default=64)
    return p.KvView(16, blocks, 1 << 20, mixes=mixes, runs=runs)


def letters(*mixes: p.Mix) -> MixLetters:
    found = MixLetters()
    found.follow(mixes)
    return found


def test_the_map_has_a_letter_for_every_block_by_mix_and_holder() -> None:
    memory = view(p.KvRun(0, 3, 0, (1, 2)), p.KvRun(3, 2, 1, (1,)), p.KvRun(5, 1, -1), p.KvRun(6, 2, 2), p.KvRun(8, 56, -1))
    (line,) = map_lines(memory, letters(A, B, C), 40, 4)
    assert line.plain == "AAABB·cc"
    assert [span.style for span in line.spans if "reverse" in str(span.style)], "what replies share is more than coloured"
    assert scale_text(memory, 40, 4) == "a letter is a block; 56 more are free"


def test_a_map_of_more_blocks_than_cells_hides_no_used_one(seed: int) -> None:
    rng = random.Random(seed)
    runs, first = [], 0
    while first < 4000:
        count, mix = rng.randrange(1, 90), rng.randrange(-1, 3)
        runs.append(p.KvRun(first, count, mix, tuple(range(rng.randrange(3))) if mix >= 0 else ()))
        first += count
    width, rows = rng.randrange(10, 120), rng.randrange(1, 16)
    memory = view(*runs)
    text = "".join(line.plain for line in map_lines(memory, letters(A, B, C), width, rows))
    used = max((run.first + run.count for run in runs if run.mix >= 0), default=0)
    per_cell = -(-used // (width * rows))
    assert len(text) == -(-used // per_cell) <= width * rows
    for cell, char in enumerate(text):
        inside = [run for run in runs if run.first < (cell + 1) * per_cell and run.first + run.count > cell * per_cell and run.mix >= 0]
        highest = max((min(len(run.requests), 2) for run in inside), default=-1)
        drawn = {"ABC"[run.mix] for run in inside if min(len(run.requests), 2) == highest}
        assert char in ({letter if highest else letter.lower() for letter in drawn} or {"·"})


def test_nothing_used_is_no_map() -> None:
    assert map_lines(view(p.KvRun(0, 64, -1)), letters(), 40, 4) == [] == map_lines(p.KvView(), letters(), 40, 4)


def test_a_mix_keeps_its_letter_while_it_is_in_memory_and_the_base_has_the_first() -> None:
    found = letters(B, C)
    assert (found[A], found[B], found[C]) == ("A", "B", "C")
    found.follow((C, A))
    assert found[C] == "C" and found[B] == OTHERS
    found.follow((C, B))
    assert (found[B], found[C]) == ("B", "C")
    found.follow(tuple(uses((str(i), 1.0)) for i in range(40)))
    assert len({found[uses((str(i), 1.0))] for i in range(40)} - {OTHERS}) == 25


RESCALED = (p.MissedRun(288, 2, "mix differs", "pirate ×0.7 then, ×0.8 now"),)


@pytest.mark.parametrize(("use", "words"), [
    (p.CacheUse(31, 0, missed_blocks=2, missed=(p.MissedRun(0, 2, "new tokens"),)), "prefix 0 hit / 31 new"),
    (p.CacheUse(31, 31), "prefix 31 hit / 0 new"),
    (p.CacheUse(312, 288, 18, missed_blocks=2, missed=RESCALED), "prefix 288 hit / 24 new: mix differs, pirate ×0.7 then, ×0.8 now"),
    (p.CacheUse(340, 288, 18, missed_blocks=4, missed=(*RESCALED, p.MissedRun(320, 2, "new tokens"))),
     "prefix 288 hit / 52 new: 2 blocks from token 288 – mix differs, pirate ×0.7 then, ×0.8 now"),
    (p.CacheUse(80, 16, 1, missed_blocks=4, missed=(p.MissedRun(16, 1, "evicted", "evicted 12 s ago for request 7"),
                                                    p.MissedRun(32, 2, "cleared"))),
     "prefix 16 hit / 64 new: 1 block from token 16 – evicted 12 s ago for request 7; 2 blocks from token 32 – cleared; "
     "1 block behind them for other reasons"),
    (p.CacheUse(40, 16, missed_blocks=2, missed=(p.MissedRun(16, 2, "new tokens"),), remark="all of it under the mix that holds now"),
     "prefix 16 hit / 24 new: all of it under the mix that holds now"),
])
def test_a_prefix_says_why_it_was_not_more(use: p.CacheUse, words: str) -> None:
    assert prefix_text(use) == words


def test_the_hit_rate_is_of_what_was_looked_up() -> None:
    assert hit_text(p.KvCounters()) == "–" and hit_text(p.KvCounters(200, 50)) == "25%"


@pytest.mark.parametrize(("event", "words"), [
    (p.RequestStarted(3, 70, (), p.CacheUse(
        70, 20, 1, 4, 4, (p.MissedRun(20, 3, "cleared", "cleared 3 s ago: adapter sql was unloaded"), p.MissedRun(64, 1, "new tokens")),
        llama_cpp_cleared=7)),
     "request 3: 20 of 70 prompt tok reused (1 block, 4 tok copied) · 4 blocks missed: 3 blocks from token 20 – cleared 3 s ago: "
     "adapter sql was unloaded"),
    (p.RequestStarted(3, 40, (), p.CacheUse(40, missed_blocks=3, missed=(p.MissedRun(0, 3, "new tokens"),))),
     "request 3: 0 of 40 prompt tok reused · 3 blocks missed: new tokens"),
    (p.CacheCleared(1, "adapter sql was unloaded"), "1 KV block cleared: adapter sql was unloaded"),
    (p.KvEvicted(3, 7, 12.2), "3 KV blocks evicted for request 7, the oldest unused for 12 s"),
    (p.RequestPreempted(2, "512 of 512 blocks are held", 300),
     "request 2 gave its 300 tokens of KV memory back and waits: 512 of 512 blocks are held"),
    (p.InvocationFired(4, p.Activation("sure", True, 50, 2, "'is it'"), 9),
     "sure acts in request 4 from token 50: the model wrote its invocation, 'is it'"),
    (p.MixSet(B, {1: 3}, recomputed={1: 34, 2: 0}), "mix: pirate ×0.75 · 34 tokens of request 1 computed again"),
])
def test_every_happening_of_kv_memory_is_a_line_with_its_cause(event: p.Event, words: str) -> None:
    assert event_line(event) == (words, False)


def test_a_start_of_which_nothing_is_known_is_no_line() -> None:
    assert event_line(p.RequestStarted(1, 9)) is None and "prompt" in started_text(1, p.CacheUse(9))


def test_what_a_prompt_found_is_told_whole_with_what_one_slot_would_have_lost() -> None:
    use = p.CacheUse(70, 20, 1, 4, 4, (p.MissedRun(20, 3, "content changed", "content of sql changed"), p.MissedRun(64, 1, "new tokens")),
                     "the rest waits", llama_cpp_cleared=7)
    assert found_text(3, use) == (
        "request 3: 20 of 70 prompt tok reused (1 block, 4 tok copied) · 4 blocks missed: 3 blocks from token 20 – content of sql changed; "
        "1 block from token 64 – new tokens · the rest waits · llama.cpp's rule would have cleared 7 blocks first")


async def test_the_panel_shows_memory_by_mix_its_hit_rate_and_the_latest_reason() -> None:
    app = bench_app()
    async with running(app) as pilot:
        use = p.CacheUse(64, missed_blocks=4, missed=(p.MissedRun(0, 3, "cleared"), p.MissedRun(48, 1, "new tokens")), llama_cpp_cleared=9)
        app.engine.emit(p.RequestStarted(7, 64, (), use), p.CacheCleared(4, "adapter sql was unloaded"), app.engine.snapshot())
        await settled(pilot)
        shown = text_of(app.screen.query_one("#panel-kv"))
        for part in ("20/512 blocks", "hit 92% of 1,204 tok", "evicted 3 · cleared 2 · preempted 1", "A base", "12 shared",
                     "4 KV blocks cleared"):
            assert part in shown, part
        assert re.search("A{12}(BBBBBBBBccc|CCCCCCCCbbb)", shown)
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.screen, EngineScreen))
        await settled(pilot)
        whole = text_of(app.screen.query_one("#panel-kv"))
        for part in ("1,104 of 1,204", "llama.cpp's rule", "300 (25%), 41 blocks cleared", "64 more, all wrong",
                     "a letter is a block; 489 more are free", "LOST",
                     "3 blocks from token 0", "1 block from token 48", "cleared 9 blocks first"):
            assert part in whole, part


async def test_a_narrow_screen_has_the_hit_rate_in_its_line() -> None:
    app = bench_app()
    async with running(app, 80, 24) as pilot:
        app.engine.emit(app.engine.snapshot())
        await settled(pilot)
        assert "KV 4% hit 92% ·" in screen_text(app)


async def test_a_reply_says_what_was_reused_and_that_it_had_to_wait() -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "Is it?")
        number = app.state.versions()[-1].request_id
        use = p.CacheUse(312, 288, 18, missed_blocks=2, missed=RESCALED)
        app.engine.emit(p.RequestStarted(number, 312, (), use))
        await settled(pilot)
        assert "reading 24, 288 reused" in screen_text(app)
        app.engine.emit(p.TextDelta(number, "Aye", 1), p.RequestPreempted(number, "512 of 512 blocks are held", 313))
        await settled(pilot)
        assert "1 tok · waits: 512 of 512 blocks are held" in text_of(app.screen.query_one(".meter")) and "Aye" in screen_text(app)
        app.engine.emit(p.RequestStarted(number, 313, (), p.CacheUse(313, 304, 19)), p.TextDelta(number, "!", 2),
                        p.RequestFinished(number, "stop", stats(2)))
        await settled(pilot)
        reply = app.state.versions()[-1]
        assert reply.text == "Aye!" and reply.prompt_tokens == 312 and reply.cache == use
        shown = text_of(app.screen.query_one(".meter"))
        assert "prefix 288 hit / 24 new: mix differs" in shown and "paused once for KV memory" in shown


async def test_the_cache_is_cleared_by_command_by_key_and_from_the_palette() -> None:
    app = bench_app()
    async with running(app) as pilot:
        app.engine.emit(app.engine.snapshot())
        await settled(pilot)
        await say(pilot, "/clear-cache")
        assert "3 KV blocks kept for later prompts will be forgotten" in app.state.items[-1].text
        command = next(command for command in app.get_system_commands(app.screen) if "Clear the KV cache" in command.title + command.help)
        command.callback()
        await pilot.press("f4", "c")
        await settled(pilot)
        assert len(app.engine.of(p.ClearCache)) == 3


@pytest.mark.parametrize(("reason", "words"), [("memory", "KV memory is full: its 3 blocks are"), ("context", "the context is full")])
async def test_a_reply_that_memory_ends_is_not_said_to_have_filled_the_context(reason: str, words: str) -> None:
    app = bench_app()
    async with running(app) as pilot:
        await say(pilot, "Go on.")
        number = app.state.versions()[-1].request_id
        detail = "KV memory is full: its 3 blocks are held" if reason == "memory" else ""
        app.engine.emit(p.RequestStarted(number, 31), p.TextDelta(number, "Aye", 5),
                        p.RequestFinished(number, reason, stats(5), detail=detail))
        await settled(pilot)
        assert words in text_of(app.screen.query_one(".meter"))

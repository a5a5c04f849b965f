"""Chats on disk: what is put down comes back, whatever becomes of the file."""
from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from bench_pilot import bench_app, running, say, screen_text, settled, uses, wait_until

from lora_bench.engine import protocol as p
from lora_bench.workbench.chat_file import ChatFile, InUse, find_chats, open_chats, read_chat
from lora_bench.workbench.chat_records import FORMAT, Began, Bench, PastChat, Recorder, line_of, read_lines
from lora_bench.workbench.exit_codes import Failed
from lora_bench.workbench.paths import chats_folder
from lora_bench.workbench.startup import latest_chat
from lora_bench.workbench.state import StartAdapter
from lora_bench.workbench.transcript import Splice, Turn, Version, history_of

NOW = datetime(2026, 1, 2, 14, 2, 11)
BENCH = Bench(p.LoadModel("/models/a.gguf"), "a", (StartAdapter("/a/pirate", "pirate", 0.75),), "be brief", p.Sampling(temperature=0.7))
WRITER = """
import random, sys, time
from datetime import datetime
from pathlib import Path
from lora_bench.workbench.chat_file import ChatFile
from lora_bench.workbench.chat_records import FORMAT, Began, Bench, Recorder, line_of
from lora_bench.workbench.transcript import Turn, Version
from lora_bench.engine.protocol import Message, Sampling
file, turns, recorder = ChatFile(Path(sys.argv[1]), print, datetime.now()), [], Recorder()
begun = line_of(Began(FORMAT, "now"))
for number in range(10_000):
    turn = Turn(f"question {number}")
    turn.add(Version(number, (Message("user", turn.asked),), (), Sampling(), phase="running"))
    turns.append(turn)
    for words in range(3):
        turn.version.text += f"word {words} of {number}; " * 20
        file.write(begun + b"".join(map(line_of, recorder.news(Bench(None, ""), turns))))
        begun = b""
    print(number, flush=True)
    time.sleep(0.002)
"""


def a_chat(draw: random.Random) -> list[Turn]:
    """Turns with versions of any kind."""
    turns: list[Turn] = []
    for number in range(draw.randint(1, 4)):
        turn = Turn("".join(draw.choice("ab\n\ud800😀\x1b[") for _ in range(draw.randint(0, 9))))
        for _ in range(draw.randint(1, 3)):
            history = (*history_of(turns, "be brief"), p.Message("user", turn.asked))
            text = "".join(draw.choice("xy \u202e") for _ in range(draw.randint(0, 30)))
            version = Version(number, history, uses(("pirate", draw.random())), p.Sampling(seed=draw.randint(0, 99)), text=text,
                              phase=draw.choice(["done", "failed", "lost"]), contents={"pirate": "3f1c"}, ambiguous=frozenset({"pirate"}))
            version.splices.append(Splice(1, 1, version.mix, ()))
            turn.add(version)
        turn.shown = draw.randrange(len(turn.versions))
        turns.append(turn)
    return turns


def lines(turns: list[Turn], bench: Bench = BENCH) -> bytes:
    return b"".join(map(line_of, [Began(FORMAT, "now"), *Recorder().news(bench, turns)]))


def alike(one: list[Turn], other: list[Turn]) -> bool:
    def plain(turns: list[Turn]) -> object:
        return [(turn.asked, turn.shown, [msgspec.to_builtins(version) | {"request_id": 0} for version in turn.versions]) for turn in turns]

    return plain(one) == plain(other)


def test_a_chat_that_grows_is_read_as_it_was_at_every_line(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        turns, recorder, written = a_chat(draw), Recorder(), line_of(Began(FORMAT, "now"))
        growing: list[Turn] = []
        for turn in turns:
            growing.append(Turn(turn.asked))
            for version in turn.versions:
                whole, version.text, phase = version.text, "", version.phase
                version.phase = "running"
                growing[-1].add(version)
                for end in range(0, len(whole) + 1, 7):
                    version.text = whole[:end]
                    written += b"".join(map(line_of, recorder.news(BENCH, growing)))
                    read, good, why = read_lines(written)
                    assert good == len(written) and not why
                    assert read.turns[-1].version.text == version.text and read.turns[-1].version.phase == "lost"
                version.text, version.phase = whole, phase
            growing[-1].shown = turn.shown
            written += b"".join(map(line_of, recorder.news(BENCH, growing)))
        past, _, _ = read_lines(written)
        assert alike(past.turns, turns) and past.bench == BENCH
        assert not Recorder(past).news(BENCH, past.turns), "what was read is put down already"


def test_a_file_that_is_cut_or_spoilt_anywhere_gives_what_came_before(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    turns = a_chat(draw)
    whole = lines(turns)
    for number in range(60):
        at = draw.randrange(len(whole) - 1)
        spoilt = draw.choice([whole[:at], whole[:at] + bytes(draw.randint(1, 50)) + whole[at + 20:], bytes(len(whole)), b""])
        file = tmp_path / f"{number}.jsonl"
        file.write_bytes(spoilt)
        saved = read_chat(file)
        if saved.problem:
            assert "damaged" in saved.problem and file.name in saved.problem
            assert (tmp_path / f"{file.name}.damaged").read_bytes() == spoilt
            again = read_chat(file) if saved.chat else None
            assert again is None and not file.exists() or not again.problem and alike(again.chat.turns, saved.chat.turns)
        else:  # the cut fell between two lines
            assert whole.startswith(spoilt) and spoilt.endswith(b"\n")
        for mine, theirs in zip(saved.chat.turns if saved.chat else [], turns, strict=False):
            assert mine.asked == theirs.asked and theirs.versions[0].text.startswith(mine.versions[0].text)


def test_a_hostile_file_is_refused_by_line(tmp_path: Path) -> None:
    begun = line_of(Began(FORMAT, "now"))
    for line in (b"[" * 100_000, b'{"is":"facts","turn":5,"version":0,"facts":{}}', b'{"is":"shown","turn":0,"version":3}', b"1" * 6000,
                 b'{"is":"wrote","turn":0,"version":0,"at":0,"text":"x"}', b'{"is":"nothing"}', b"\xff\xfe", b'{"is":"said","message":5}',
                 b'{"is":"facts","turn":0,"version":0,"asked":"a","facts":{},"history":[9]}', begun):
        chat, good, why = read_lines(begun + line + b"\n")
        assert good == len(begun) and why.startswith("line 2 cannot be read: ") and len(why) < 300 and isinstance(chat, PastChat)
    assert "format 9" in read_lines(line_of(Began(9, "now")))[2]


def test_a_kill_at_any_moment_leaves_a_chat_that_can_be_read(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(4):
        folder = tmp_path / str(number)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
        told = [writer.stdout.readline() for _ in range(20)]
        time.sleep(draw.random() * 0.06)
        with pytest.raises(InUse):
            read_chat(next(folder.glob("*.jsonl")))
        assert not list(find_chats(folder)), "a chat that is open is not offered"
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        (saved,) = find_chats(folder)
        assert saved.chat.turns and len(told) == 20
        assert all(turn.version.text.startswith(f"word 0 of {at};") for at, turn in enumerate(saved.chat.turns[:-1]))
        assert not saved.problem or len(list(folder.glob("*.damaged"))) == 1


def test_a_disk_that_refuses_is_said_once_and_what_waited_is_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.write_text("in the way")
    told: list[str] = []
    file = ChatFile(folder, told.append, NOW)
    whole = lines(a_chat(random.Random(1)))
    file.write(whole[:50])
    file.write(whole[50:90])
    time.sleep(0.2)
    assert len(told) == 1 and str(folder) in told[0]
    folder.unlink()
    file.write(whole[90:])
    file.finish()
    file.wait()
    (made,) = folder.glob("*.jsonl")
    assert made.read_bytes() == whole and made.stat().st_mode & 0o077 == 0


async def test_a_chat_goes_on_in_another_run(tmp_path: Path) -> None:
    app = bench_app("Arr, matey", "And more")
    async with running(app) as pilot:
        app.state.board.set_scale("pirate", 0.4)
        app.control.set_sampling(seed=7)
        await say(pilot, "Who are you?")
        await wait_until(pilot, lambda: not app.state.running)
        app.control.chats.keep()
        await wait_until(pilot, lambda: open_chats(chats_folder()))
        await say(pilot, "/resume")
        assert "no earlier chat is in" in screen_text(app)
        with pytest.raises(ValueError, match="^the earlier chat is open in another workbench: leave it there"):
            bench_app().control.chats.resume("")
        with pytest.raises(Failed, match="open in another workbench"):
            latest_chat()
        app.control.chats.close()
    again = bench_app("A third")
    async with running(again) as pilot:
        await wait_until(pilot, lambda: again.state.last_chat)
        await settled(pilot)
        assert "1 turn · SmolLM2-135M-Instruct · Who are you?" in again.state.last_chat and "/resume" in screen_text(again)
        await say(pilot, "/resume")
        assert "Arr, matey" in screen_text(again) and "goes on" in again.state.items[-1].text
        assert again.control.sampling.seed == 7 and again.state.board["pirate"].scale == 0.4
        await say(pilot, "And then?")
        await wait_until(pilot, lambda: not again.state.running)
        sent = again.engine.of(p.Generate)[-1].prompt.messages
        assert [message.content for message in sent] == ["Who are you?", "Arr, matey", "And then?"]
        again.control.chats.close()
    (saved,) = find_chats(chats_folder())
    assert [turn.version.text for turn in saved.chat.turns] == ["Arr, matey", "A third"]


async def test_each_new_chat_has_its_file_and_a_damaged_one_is_told_once() -> None:
    app = bench_app("one", "two")
    async with running(app) as pilot:
        for question in ("first?", "second?"):
            await say(pilot, question)
            await wait_until(pilot, lambda: not app.state.running)
            await pilot.press("ctrl+n")
            app.control.chats.keep()
        await say(pilot, "/chats")
        await wait_until(pilot, lambda: all(words in screen_text(app) for words in ("1  ", "first?", "second?")))
        await say(pilot, "/resume 9")
        assert "no earlier chat" in screen_text(app)
        app.control.chats.close()
    file = max(chats_folder().glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
    os.truncate(file, file.stat().st_size - 9)
    for told in (True, False):
        again = bench_app()
        async with running(again) as pilot:
            await wait_until(pilot, lambda again=again: again.state.last_chat)
            await settled(pilot)
            assert ("damaged" in screen_text(again)) is told


async def test_who_wants_no_chats_kept_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_bench.workbench.paths import settings_file

    settings_file().parent.mkdir(parents=True, exist_ok=True)
    settings_file().write_text("keep_chats = false\n")
    app = bench_app("one")
    async with running(app) as pilot:
        await say(pilot, "first?")
        await wait_until(pilot, lambda: not app.state.running)
        app.control.chats.close()
    assert not chats_folder().exists()

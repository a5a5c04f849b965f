"""The cases of a bank about chats on disk: chats are put down, spoilt and killed while they are written, in a folder of their own."""
from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import datetime
from itertools import count
from pathlib import Path

from lora_bench.engine.protocol import Message, Sampling
from lora_bench.workbench.chat_file import ChatFile, find_chats
from lora_bench.workbench.chat_records import FORMAT, Began, Bench, Recorder, line_of
from lora_bench.workbench.transcript import Turn, Version

FOLDER = Path("saved-chats")
MOST_LOST_S = 2.0


def put_down(words: str) -> None:
    """One chat, whole."""
    file = ChatFile(FOLDER, _fail, datetime.now())
    turn = _turn(words)
    turn.version.text, turn.version.phase = f"reply to {words}", "done"
    file.write(b"".join(map(line_of, [Began(FORMAT, "now"), *Recorder().news(Bench(None, ""), [turn])])))
    file.finish()
    file.wait()


def spoil(how: str) -> None:
    """The latest chat's file: cut in its middle, emptied, or all zeros."""
    file = max(FOLDER.glob("*.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    data = file.read_bytes()
    file.write_bytes({"cut": data[:len(data) // 2], "empty": b"", "zeros": bytes(len(data))}[how])


def found() -> tuple[list[str], list[str]]:
    """What is said of the damaged ones, and the first words of the others. Raises ValueError when a whole one or damaged bytes are gone."""
    chats = list(find_chats(FOLDER))
    whole = [saved.chat.turns[0].asked for saved in chats if saved.chat and saved.chat.turns]
    problems = [saved.problem for saved in chats if saved.problem]
    if not any(words.startswith("another") for words in whole):
        raise ValueError("the other chat is gone")
    if len(list(FOLDER.glob("*.damaged"))) != len(problems):
        raise ValueError("damaged bytes were not kept")
    if any(saved.problem for saved in find_chats(FOLDER)):
        raise ValueError("it is said twice")
    return problems, whole


def kill_writer(seconds: float, replies: int) -> float:
    """Kill a process that puts a chat down, so long after it told of `replies` replies; seconds of the chat that are gone.

    Raises ValueError when the chat that is left is not whole up to some moment.
    """
    for file in FOLDER.glob("*"):
        file.unlink()
    writer = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    for _ in range(replies):
        writer.stdout.readline()
    time.sleep(seconds)
    writer.send_signal(signal.SIGKILL)
    killed = time.time()
    writer.wait()
    saved = next(iter(find_chats(FOLDER)), None)
    if saved is None or saved.chat is None:
        raise ValueError("no chat is left")
    words = "".join(turn.version.text for turn in saved.chat.turns).split()
    numbers = [int(word.partition("@")[0]) for word in words]
    if numbers != list(range(len(numbers))):
        raise ValueError(f"the words that are left are {numbers[:20]}")
    return killed - float(words[-1].partition("@")[2]) if words else killed - float(saved.chat.turns[0].asked)


def _turn(words: str) -> Turn:
    turn = Turn(words)
    turn.add(Version(0, (Message("user", words),), (), Sampling(), phase="running"))
    return turn


def _fail(sentence: str) -> None:
    raise OSError(sentence)


def _write() -> None:
    """Put a chat down as fast as it goes: each word is its number and the time at which it was said."""
    file, recorder, turns, words = ChatFile(FOLDER, _fail, datetime.now()), Recorder(), [_turn(str(time.time()))], count()
    begun = line_of(Began(FORMAT, "now"))
    while True:
        for _ in range(20):
            turns[-1].version.text += f"{next(words)}@{time.time()} "
            file.write(begun + b"".join(map(line_of, recorder.news(Bench(None, ""), turns))))
            begun = b""
            time.sleep(0.001)
        turns[-1].version.phase = "done"
        turns.append(_turn(str(time.time())))
        print(len(turns), flush=True)


if __name__ == "__main__":
    _write()

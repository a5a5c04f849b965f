"""The real program with its real engine in a real terminal, as a person uses it."""
from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripted_base import write_scripted_base
from terminal import BENCH, Terminal

CTRL_C, CTRL_E, CTRL_Q, CTRL_Z, ENTER, TAB, SHIFT_TAB = "\x03", "\x05", "\x11", "\x1a", "\r", "\t", "\x1b[Z"
QUESTION = "What is the capital of France?"
EVIL = ["Look: ", "\x1b]2;PWN", "ED\x07 and ", "\x1b]0;GOT", "CHA\x1b\\ and ", "\x1b[2J\x1b[1;1H",
        "[/nope] ", "[red]", "\x9b31m", "\u202eesrever", " end.\n"]

Open = Callable[..., Terminal]


@pytest.fixture
def open_terminal() -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(*arguments: str, **options) -> Terminal:
        opened.append(Terminal(*arguments, **options))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def ask(terminal: Terminal, question: str) -> None:
    """Type a question and send it once it stands in the prompt."""
    before = terminal.text.count(question)
    terminal.type(question)
    terminal.wait_for(lambda text: text.count(question) > before)
    terminal.type(ENTER)


def test_ask_switch_an_adapter_on_ask_again_and_quit(sample_base: Path, open_terminal: Open) -> None:
    terminal = open_terminal()
    terminal.wait_for(lambda text: "engine idle" in text and "pirate" in text)
    title = terminal.screen.title
    ask(terminal, QUESTION)
    text = terminal.wait_for(lambda text: "Paris" in text and text.count("tok/s") == 1)
    assert "Arrr" not in text
    terminal.type(TAB)
    terminal.wait_for("On/off")
    while not re.search(r"\[.\]▸pirate", terminal.text):
        line = re.search(r"\[.\]▸(\w+)", terminal.text)
        terminal.type("j")
        terminal.wait_for(lambda text, line=line: (now := re.search(r"\[.\]▸(\w+)", text)) and (not line or now[1] != line[1]))
    terminal.type(" ")
    terminal.wait_for("[x]▸pirate")
    terminal.wait_for(lambda text: re.search(r"G\d pirate", text))
    terminal.type(SHIFT_TAB)
    terminal.wait_for("⏎ Send")
    ask(terminal, QUESTION)
    text = terminal.wait_for(lambda text: "Arrr" in text and text.count("tok/s") == 2)
    assert "pirate ×1.00" in text and re.search(r"G\d pirate +r8", text)
    assert terminal.screen.title == title
    engine = terminal.children()
    terminal.type(CTRL_Q)
    assert terminal.wait_end() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in engine)


def test_a_reply_cannot_act_on_the_terminal(tmp_path: Path, open_terminal: Open) -> None:
    base = write_scripted_base(tmp_path, EVIL)
    terminal = open_terminal(str(base))
    terminal.wait_for("engine idle")
    title = terminal.screen.title
    ask(terminal, "Do your worst")
    text = terminal.wait_for(lambda text: "tok/s" in text and "end." in text and "engine idle" in text)
    assert terminal.screen.title == title
    assert "Look: ␛]2;PWNED" in text and "[/nope]" in text
    assert "Do your worst" in text
    for attack in ("\x1b]2;PWN", "\x1b]0;GOT", "\x9b31m", "\u202e"):
        assert attack.encode() not in terminal.raw
    terminal.type(CTRL_Q)
    assert terminal.wait_end() == 0


def test_the_engine_dies_and_is_started_again(tmp_path: Path, open_terminal: Open) -> None:
    base = write_scripted_base(tmp_path, ["Here I am", ", again."])
    terminal = open_terminal(str(base), columns=100, rows=30)
    terminal.wait_for("engine idle")
    ask(terminal, "Who is there?")
    terminal.wait_for(lambda text: "Here I am, again." in text and "tok/s" in text)
    os.kill(terminal.children()[0], signal.SIGKILL)
    text = terminal.wait_for("signal 9")
    assert "Here I am, again." in text and "Who is there?" in text
    terminal.type(CTRL_E)
    terminal.wait_for("engine idle")
    ask(terminal, "And now?")
    terminal.wait_for(lambda text: text.count("Here I am, again.") == 2)
    terminal.type(CTRL_Q)
    assert terminal.wait_end() == 0


def test_a_model_that_does_not_load_opens_the_load_screen(tmp_path: Path, open_terminal: Open) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    good = tmp_path / "good"
    good.mkdir()
    write_scripted_base(good, ["It works", " now."])
    terminal = open_terminal(str(tmp_path / "broken.gguf"), columns=100, rows=30)
    text = terminal.wait_for(lambda text: "Open a base model" in text and "✗" in text)
    assert "broken.gguf" in text
    terminal.type(str(good) + ENTER)
    terminal.wait_for("engine idle")
    ask(terminal, "Hello?")
    terminal.wait_for("It works now.")
    terminal.type(CTRL_Q)
    assert terminal.wait_end() == 0


def test_quit_while_the_model_loads(sample_base: Path, open_terminal: Open) -> None:
    terminal = open_terminal()
    terminal.wait_for("engine")
    engine = terminal.children()
    terminal.type(CTRL_Q)
    began = time.monotonic()
    assert terminal.wait_end() == 0
    print(f"it took {time.monotonic() - began:.2f} s to end")
    assert not any(Path(f"/proc/{pid}").exists() for pid in engine)


def test_a_signal_ends_it_as_a_key_does_and_ctrl_c_does_not(tmp_path: Path, open_terminal: Open) -> None:
    base = write_scripted_base(tmp_path, ["Here I am", ", still."])
    terminal = open_terminal(str(base), columns=100, rows=30)
    terminal.wait_for("engine idle")
    terminal.type(CTRL_C)
    terminal.wait_for("Ctrl+Q leaves")
    engine = terminal.children()
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.wait_end() == 128 + signal.SIGTERM
    assert b"\x1b[?1049l" in terminal.raw, "the screen of before is back"
    assert not any(Path(f"/proc/{pid}").exists() for pid in engine)


def test_a_terminal_that_only_prints_lines_is_told_so(open_terminal: Open) -> None:
    terminal = open_terminal(TERM="dumb")
    assert terminal.wait_end() == 2
    assert "TERM=dumb" in terminal.text.replace("\n", "") and b"\x1b" not in terminal.raw


def test_a_tiny_terminal_grows_and_wide_text_is_drawn_in_the_locale_c(tmp_path: Path, open_terminal: Open) -> None:
    base = write_scripted_base(tmp_path, ["漢字 ", "naïve "])
    terminal = open_terminal(str(base), columns=20, rows=5, LANG="C", LC_ALL="C", NO_COLOR="1")
    terminal.wait_for("20×6")
    terminal.type("hi")
    for columns, rows in ((3, 2), (100, 30), (60, 8), (100, 30)):
        terminal.resize(columns, rows)
        terminal.pump(0.02)
    terminal.wait_for(lambda text: "hi" in text and "engine idle" in text)
    terminal.type(ENTER)
    terminal.wait_for(lambda text: "漢" in text and "naïve" in text and "tok/s" in text)
    terminal.type(CTRL_Q)
    assert terminal.wait_end() == 0


def test_suspended_it_leaves_the_shell_sane_and_comes_back(tmp_path: Path, open_terminal: Open) -> None:
    base = write_scripted_base(tmp_path, ["Here I am", ", still."])
    terminal = open_terminal(command=("bash", "--norc", "-i"), columns=100, rows=30, PS1="SHELL$ ")
    terminal.wait_for("SHELL$")
    terminal.type(shlex.join([*BENCH, str(base)]) + ENTER)
    terminal.wait_for("engine idle")
    terminal.type(CTRL_Z)
    terminal.wait_for(lambda _: terminal.raw.endswith(b"SHELL$ "))
    assert terminal.raw.rfind(b"\x1b[?1049l") > terminal.raw.rfind(b"\x1b[?1049h"), "the screen of before is back"
    assert terminal.raw.rfind(b"\x1b[?25h") > terminal.raw.rfind(b"\x1b[?25l"), "the cursor is shown"
    terminal.type("echo A$((20+3))B" + ENTER)
    terminal.wait_for("A23B")
    drawn = len(terminal.raw)
    terminal.type("fg" + ENTER)
    terminal.wait_for(lambda _: b"\x1b[?1049h" in terminal.raw[drawn:] and "Message" in terminal.text)
    ask(terminal, "Still there?")
    terminal.wait_for(lambda text: "Here I am, still." in text and "tok/s" in text)
    terminal.type(CTRL_Q)
    terminal.wait_for(lambda _: terminal.raw.endswith(b"SHELL$ "))


def test_a_chat_survives_a_signal_and_goes_on(tmp_path: Path, open_terminal: Open) -> None:
    base = write_scripted_base(tmp_path, ["Here I am", ", still."])
    terminal = open_terminal(str(base), columns=100, rows=30)
    terminal.wait_for("engine idle")
    ask(terminal, "Who is there?")
    terminal.wait_for(lambda text: "Here I am, still." in text and "tok/s" in text)
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.wait_end() == 128 + signal.SIGTERM
    again = open_terminal("--resume", columns=100, rows=30)
    text = again.wait_for(lambda text: "engine idle" in text and "goes on" in text)
    assert "Who is there?" in text and "Here I am, still." in text
    ask(again, "And now?")
    again.wait_for(lambda text: text.count("Here I am, still.") == 2)
    again.type(CTRL_Q)
    assert again.wait_end() == 0

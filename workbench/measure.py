"""Measures the screen as a person feels it: the real program in a pseudo-terminal, keys in, paint out.

First paint counts from the start of the process. A key's lag is the time from its press to its letter on the screen,
taken while the engine decodes.
"""
from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from . import exit_codes, output

COLUMNS, ROWS = 160, 45
QUESTION = "What is the capital of Finland?"
ANSWER = "Finland is"
LONG_QUESTION = "Write a long story about a dragon and a lighthouse keeper."
KEYS = [chr(code) for code in range(0x100, 0x17F)]
"""letters that no reply has, each typed once"""
PAUSE_S = 0.11


class MeasureFailed(Exception):
    """What was waited for did not come."""


@dataclass(frozen=True)
class ScreenTimes:
    first_paint_s: float
    ready_s: float
    """process start to a base that takes questions"""
    first_reply_s: float
    """process start to the answer of a question that was sent as soon as the base was ready"""
    key_lag_ms: tuple[float, ...]
    """ascending"""

    def lag(self, share: float) -> float:
        """The lag, in ms, that `share` of the keys do not exceed."""
        return self.key_lag_ms[min(int(share * len(self.key_lag_ms)), len(self.key_lag_ms) - 1)]


def report(as_json: bool) -> int:
    """Measure and print; returns the exit code. Raises Failed when nothing could be measured."""
    progress = output.ProgressLine(lines=True)
    try:
        times = measure(progress.show)
    except MeasureFailed as failed:
        raise exit_codes.Failed(f"nothing was measured: {failed}", exit_codes.ENGINE_ERROR) from failed
    finally:
        progress.clear()
    answer = {
        "screen": f"{COLUMNS}x{ROWS}",
        "first_paint_s": round(times.first_paint_s, 3), "ready_s": round(times.ready_s, 2), "first_reply_s": round(times.first_reply_s, 2),
        "key_lag_ms": {name: round(times.lag(share), 1) for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))},
        "keys": len(times.key_lag_ms),
    }
    output.write("\n".join([json.dumps(answer)] if as_json else output.as_lines(answer)) + "\n")
    return exit_codes.OK


def measure(progress: Callable[[str], None] = lambda text: None) -> ScreenTimes:
    """Run the workbench on the default model, which answers QUESTION with ANSWER, and measure it. Raises MeasureFailed."""
    progress("starting the workbench in a terminal of its own")
    with Terminal([sys.executable, "-P", "-m", "lora_bench.workbench.cli"]) as terminal:
        painted = terminal.wait_for("lora-bench", 30)
        progress("painted; waiting for the model")
        ready = terminal.wait_for("is ready", 300)
        progress("ready; asking")
        terminal.type(QUESTION + "\r")
        replied = terminal.wait_for(ANSWER, 120)
        terminal.wait_for("tok/s", 60)
        terminal.type(LONG_QUESTION + "\r")
        progress(f"typing {len(KEYS[:100])} letters while it decodes")
        terminal.drain(2.0)
        lags = [_key_lag(terminal, key) for key in KEYS[:100]]
    return ScreenTimes(painted, ready, replied, tuple(sorted(lags)))


def _key_lag(terminal: Terminal, key: str) -> float:
    terminal.drain(PAUSE_S)
    pressed = terminal.now()
    terminal.type(key)
    return (terminal.wait_for(key, 10) - pressed) * 1e3


class Terminal:
    """A program in a pseudo-terminal of its own; times are seconds since its start."""

    def __init__(self, command: Sequence[str]) -> None:
        self._start = time.perf_counter()
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
            os.execvp(command[0], command)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._unread = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGTERM)
        deadline = self.now() + 5
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if self.now() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            with suppress(MeasureFailed):  # it has ended, and must be waited for all the same
                self.drain(0.05)
        os.close(self._fd)

    def now(self) -> float:
        return time.perf_counter() - self._start

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def drain(self, seconds: float) -> None:
        """Let the program run; what it paints is dropped."""
        deadline = self.now() + seconds
        while (left := deadline - self.now()) > 0:
            self._read(left)
        self._unread = b""

    def wait_for(self, text: str, seconds: float) -> float:
        """The time at which `text` was painted in one piece; everything up to it is dropped. Raises MeasureFailed."""
        wanted, deadline = text.encode(), self.now() + seconds
        while (found := self._unread.find(wanted)) < 0:
            if (left := deadline - self.now()) <= 0:
                raise MeasureFailed(f"the screen did not show {text!r} within {seconds:g} s")
            self._read(left)
        self._unread = self._unread[found + len(wanted):]
        return self.now()

    def _read(self, seconds: float) -> None:
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                self._unread += os.read(self._fd, 1 << 16)
            except OSError as error:  # Linux says so when the program has ended
                raise MeasureFailed("the program ended") from error

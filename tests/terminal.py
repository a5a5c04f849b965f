"""A real pseudo-terminal with a real program in it, seen through pyte's terminal emulator."""
from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

PATIENCE_S = 90
BENCH = (sys.executable, "-m", "lora_bench.workbench.cli")


class Terminal:
    """`lora-bench ARGUMENTS` in a terminal of `columns` x `rows`, or the program `command`. `raw` keeps every byte it wrote."""

    def __init__(self, *arguments: str, columns: int = 120, rows: int = 36, command: Sequence[str] = BENCH, **environment: str) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.raw = b""
        self.exit_code: int | None = None
        self._stream = pyte.ByteStream(self.screen)
        env = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment}
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execvpe(command[0], [*command, *arguments], env)

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def paste(self, text: str) -> None:
        """As a terminal pastes: between brackets; what the program writes meanwhile is read, or both sides would wait."""
        data = b"\x1b[200~" + text.encode() + b"\x1b[201~"
        os.set_blocking(self._fd, False)
        try:
            while data:
                if select.select([], [self._fd], [], 0.01)[1]:
                    data = data[os.write(self._fd, data[:65536]):]
                self.pump(0.0)
        finally:
            os.set_blocking(self._fd, True)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed by itself, as a shell wants it."""
        return bool(termios.tcgetattr(self._fd)[3] & termios.ECHO)

    def pump(self, seconds: float) -> bool:
        """Feed what the program writes within `seconds` to the screen; False once it has ended."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux says so when the other side is closed
            data = b""
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def wait_for(self, true: str | Callable[[str], bool]) -> str:
        """The screen's text once it holds a string or fulfils a condition; AssertionError with the screen when it never does."""
        deadline = time.monotonic() + PATIENCE_S
        alive = True
        while alive and time.monotonic() < deadline:
            if true in self.text if isinstance(true, str) else true(self.text):
                return self.text
            alive = self.pump(0.1)
        state = "the program goes on" if alive else "the program has ended"
        raise AssertionError(f"{true!r} did not come; {state}; the screen:\n{self.text}")

    def wait_end(self) -> int:
        """The exit code, once the program has ended by itself."""
        deadline = time.monotonic() + PATIENCE_S
        while self.pump(0.1):
            assert time.monotonic() < deadline, f"it does not end; the screen:\n{self.text}"
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.exit_code

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def close(self) -> None:
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

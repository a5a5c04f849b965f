"""The engine as a child process on this machine.

No torch and no textual here: the command line starts the child first and imports the screen while
the child imports torch.
"""
from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from logging.handlers import RotatingFileHandler
from pathlib import Path

import platformdirs

from ...engine.protocol import (
    Command,
    CommandFailed,
    Emit,
    EngineFailed,
    Generate,
    RequestFailed,
    Shutdown,
    read_events,
    write_frame,
)
from ..text import clean_line

_ENGINE = [sys.executable, "-P", "-X", "faulthandler", "-m", "lora_bench.engine"]
_LOG_BYTES = 1 << 20
_TAIL_LINES = 40


class LocalBackend:
    """One engine process at a time; its events go to `emit`, called on a thread of this backend.

    `emit` must be quick and thread-safe (`deque.append`, `queue.put`). When the process ends without being
    asked to, `emit` gets one `EngineFailed(fatal=True)` that says how; `start` may then be called again.
    """

    def __init__(self, emit: Emit, log_file: Path | None = None, command: list[str] | None = None) -> None:
        self.log_file = log_file or platformdirs.user_log_path("lora-bench") / "engine.log"
        self._emit = emit
        self._command = command or _ENGINE
        self._child: _Child | None = None

    def start(self) -> None:
        """Start the engine process, after ending the one that runs. Raises OSError when no process can be made."""
        self.stop()
        self._child = _Child(self._command, self._emit, _open_log(self.log_file))

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child else None

    def send(self, command: Command) -> None:
        """Queue a command; returns at once. Without a living engine it is dropped (EngineFailed has said so)."""
        if self._child:
            self._child.outbox.put(command)

    def stop(self, timeout: float = 1.5) -> None:
        """End the engine, by force after `timeout` seconds. Nothing is emitted for it any more."""
        if self._child:
            self._child.stop(timeout)
            self._child = None


class _Child:
    """A process with its three threads: commands down, events up, log lines to the file."""

    def __init__(self, command: list[str], emit: Emit, log: logging.Handler | None) -> None:
        self.outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._emit = emit
        self._log = log
        self._stopping = False
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        pipe = subprocess.PIPE
        # Its own session: Ctrl+C in the terminal is ours to handle. It ends by itself when our end of stdin closes.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._logger = _thread(self._read_log)
        _thread(self._write_commands)
        _thread(self._read_events)

    def stop(self, timeout: float) -> None:
        self._stopping = True
        self.outbox.put(Shutdown())
        self.outbox.put(None)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _write_commands(self) -> None:
        stdin = self.process.stdin
        try:
            while (command := self.outbox.get()) is not None:
                try:
                    write_frame(stdin, command)
                except ValueError as error:  # no frame holds it: it is not sent, and that is said
                    self._emit(_refused(command, str(error)))
            stdin.close()
        except OSError:
            pass  # the process is gone; the reader of its events says so

    def _read_events(self) -> None:
        problem = ""
        try:
            for event in read_events(self.process.stdout):
                if not self._stopping:
                    self._emit(event)
        except (ValueError, OSError) as error:
            problem = f"it sent what is no event ({error})"
            self.process.kill()
        self.process.wait()
        self.outbox.put(None)
        self._logger.join(timeout=1)
        if not self._stopping:
            how = problem or _how_it_ended(self.process.returncode)
            self._emit(EngineFailed(_last_words(how, self._tail)))

    def _read_log(self) -> None:
        for raw in self.process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self._tail.append(line)
            if self._log:
                self._log.emit(logging.makeLogRecord({"msg": line, "levelno": logging.INFO}))
        if self._log:
            self._log.close()


def _refused(command: Command, message: str) -> RequestFailed | CommandFailed:
    return RequestFailed(command.request_id, message) if isinstance(command, Generate) else CommandFailed(message)


def _thread(target) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True, name=f"engine-{target.__name__}")
    thread.start()
    return thread


def _open_log(path: Path) -> logging.Handler | None:
    """The rotating log; None where none can be written, which must not keep the engine from running."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=2, encoding="utf-8", errors="replace")
    except OSError:
        return None


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = {signal.SIGKILL: " (out of memory, or killed by hand)", signal.SIGSEGV: " (a crash in native code)"}.get(-code, "")
    return f"it was killed by signal {-code}, {name}{hint}"


def _last_words(how: str, tail: deque[str]) -> str:
    lines = [line.strip() for line in tail if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    last = (fatal or lines)[-1:]
    words = f"; its last log line: {clean_line(last[0], 300)}" if last else ""
    return f"the engine process is gone: {how}{words}"

"""The engine process as the workbench holds it: started, spoken to, found dead, ended."""
from __future__ import annotations

import queue
import sys
from pathlib import Path

import pytest

from lora_bench.engine import protocol as p
from lora_bench.workbench.backends.local import LocalBackend

PREAMBLE = """
import os, sys, time
from lora_bench.engine import protocol as p
out = sys.stdout.buffer
p.write_frame(out, p.EngineStarted(os.getpid(), "2.13.0", ("cpu",)))
"""
ECHO = "for command in p.read_commands(sys.stdin.buffer):\n    p.write_frame(out, p.CommandFailed(type(command).__name__))\n"


class Engine:
    """A backend over a small script, and its events."""

    def __init__(self, folder: Path, script: str) -> None:
        self.events: queue.Queue[p.Event] = queue.Queue()
        self.log = folder / "engine.log"
        self.backend = LocalBackend(self.events.put, self.log, [sys.executable, "-c", PREAMBLE + script])
        self.backend.start()

    def next(self) -> p.Event:
        return self.events.get(timeout=20)


@pytest.fixture
def engine(tmp_path: Path):
    made: list[Engine] = []

    def make(script: str) -> Engine:
        made.append(Engine(tmp_path, script))
        assert isinstance(made[-1].next(), p.EngineStarted)
        return made[-1]

    yield make
    for one in made:
        one.backend.stop()


def test_commands_go_down_and_events_come_up(engine) -> None:
    child = engine(ECHO)
    child.backend.send(p.Abort(3))
    assert child.next() == p.CommandFailed("Abort")


def test_a_killed_process_is_told_by_its_signal(engine) -> None:
    child = engine("os.kill(os.getpid(), 9)")
    failed = child.next()
    assert isinstance(failed, p.EngineFailed) and failed.fatal
    assert "signal 9, SIGKILL (out of memory" in failed.message


def test_an_exit_is_told_with_the_last_log_line_and_the_log_is_kept(engine) -> None:
    child = engine("print('loading', file=sys.stderr); raise SystemExit('no \\x1b]2;space\\x07 left')")
    message = child.next().message
    assert "exit code 1" in message and message.endswith("its last log line: no ␛]2;space␇ left")
    assert "loading" in child.log.read_text()


def test_a_native_crash_is_told_by_its_cause(engine) -> None:
    child = engine("import faulthandler; faulthandler.enable(); faulthandler._sigsegv()")
    message = child.next().message
    assert "SIGSEGV (a crash in native code)" in message and "Fatal Python error" in message


def test_bytes_that_are_no_event_end_it(engine) -> None:
    child = engine("out.write(b'\\xff\\xff\\xff\\xffhello'); out.flush(); time.sleep(60)")
    assert "no event" in child.next().message


def test_stop_says_nothing_and_can_be_repeated(engine) -> None:
    child = engine(ECHO)
    process = child.backend._child.process
    child.backend.stop()
    child.backend.stop()
    assert process.returncode is not None
    assert child.events.empty() or isinstance(child.next(), p.CommandFailed)


def test_stop_kills_a_process_that_does_not_listen(engine) -> None:
    child = engine("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(60)")
    process = child.backend._child.process
    child.backend.stop(timeout=0.3)
    assert process.returncode == -9


def test_sending_never_blocks_though_nobody_reads(engine) -> None:
    child = engine("time.sleep(60)")
    for _ in range(64):
        child.backend.send(p.Generate(1, p.RawText("x" * (1 << 16))))
    child.backend.stop(timeout=0.3)


def test_it_starts_again_after_a_death(engine) -> None:
    child = engine(ECHO)
    first = child.backend.pid
    child.backend._child.process.kill()
    assert isinstance(child.next(), p.EngineFailed)
    child.backend.start()
    assert isinstance(child.next(), p.EngineStarted) and child.backend.pid != first


def test_a_log_that_cannot_be_written_does_not_keep_it_from_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    events: queue.Queue[p.Event] = queue.Queue()
    backend = LocalBackend(events.put, tmp_path / "file" / "engine.log", [sys.executable, "-c", PREAMBLE + ECHO])
    backend.start()
    assert isinstance(events.get(timeout=20), p.EngineStarted)
    backend.stop()

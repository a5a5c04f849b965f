"""The engine as a child process: command frames on stdin, event frames on what was stdout.

`python -m lora_bench.engine`. Ends when stdin closes, so it never outlives the front end.
"""
from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, BinaryIO

from .protocol import EngineFailed, EngineStarted, Event, Shutdown, read_commands, write_frame

if TYPE_CHECKING:
    from .service import Inbox

NICENESS = 5
"""the screen's process goes first when cores are short"""
SPINS = "2000"
"""GOMP_SPINCOUNT: how long OpenMP's threads spin for each other before they sleep. A trade: threads that slept must be woken for every
product, which on idle cores shows below 2000; where another program keeps one of two cores busy, prompts take half as long again with
10000, as the system moves no thread onto a core on which another one spins, and OpenMP's own far longer default 5 to 10 times as long."""
PROFILER_LOG = "6"
"""KINETO_LOG_LEVEL: nothing. Of a trace that fails the engine says why, and lines about those that do not would be the log's last words"""
EXIT_SECONDS = 1.0
"""that the loop has to end by itself when the front end is gone"""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C in the terminal is the front end's to act on
    frames = _private_stdout()
    lock = threading.Lock()

    def emit(event: Event) -> None:
        try:
            with lock:
                write_frame(frames, event)
        except OSError:  # nobody listens any more
            os._exit(0)

    torch_version = importlib.metadata.version("torch")
    emit(EngineStarted(os.getpid(), torch_version, ()))
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported
    os.environ.setdefault("KINETO_LOG_LEVEL", PROFILER_LOG)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    try:
        from .machine import device_names, use_cores
        from .service import Inbox, serve
        use_cores()
    except Exception as error:  # a broken torch installation: say so, the screen lives on
        emit(EngineFailed(f"the engine cannot start: {type(error).__name__}: {error}; see lora-bench doctor"))
        return
    inbox = Inbox()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    emit(EngineStarted(os.getpid(), torch_version, device_names()))
    serve(inbox, emit)
    sys.stderr.flush()
    os._exit(0)  # at once: the reader may hold stdin's lock, on which an orderly exit would abort


def _private_stdout() -> BinaryIO:
    """Our own copy of fd 1; fd 1 itself becomes stderr, so that no library's print falls among the frames."""
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return frames


def _read(inbox: Inbox) -> None:
    try:
        for command in read_commands(sys.stdin.buffer):
            inbox.put(command)
    except ValueError as error:
        print(f"engine: a frame that is no command: {error}", file=sys.stderr)
    inbox.put(Shutdown())
    time.sleep(EXIT_SECONDS)
    os._exit(0)  # the loop is deep in a step or a load, and nobody waits for it


if __name__ == "__main__":
    main()

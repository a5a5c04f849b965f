"""Opens the workbench: the engine process first, then the screen's imports beside it."""
from __future__ import annotations

import gc
import sys
from collections import deque
from pathlib import Path

from ..engine.protocol import Event, LoadModel
from . import exit_codes, output
from .backends.local import LocalBackend
from .state import StartAdapter


def open_workbench(load: LoadModel | None, adapters: tuple[StartAdapter, ...] = (), chat: Path | None = None) -> int:
    """Run the workbench until the person leaves; returns the process's exit code.

    `load` None opens the load screen; `chat` is the file of an earlier chat to go on with. An engine process that cannot be started is said
    on standard error.
    """
    inbox: deque[Event] = deque()
    backend = LocalBackend(inbox.append)
    try:
        backend.start()
    except OSError as error:
        output.narrate(f"lora-bench: the engine process cannot be started: {error}")
        return exit_codes.ENGINE_ERROR
    try:
        from .app import BenchApp  # after the child: importing the screen takes as long as the child's first breath

        if not sys.__stderr__.isatty():
            sys.__stderr__ = sys.__stdout__  # the screen is drawn there; 2>file must not take it away
        gc.freeze()  # imported code is never garbage: searching it stops the screen for longer than a frame
        app = BenchApp(backend, inbox, load, adapters, chat=chat)
        try:
            app.run()
        finally:
            app.control.chats.close()
        return app.return_code or 0
    finally:
        backend.stop()

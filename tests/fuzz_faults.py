"""A target whose every input is a fault of another kind: what the harness must see."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random

from fuzz.target import Run, Target, Wrong

FAULTS = ["good", "exception", "broken promise", "silent message", "escapes", "memory", "slow", "canary", "end"]
_held: list[bytes] = []


class Refused(ValueError):
    """The one documented error."""


def prepare(folder: Path) -> Run:
    def run(data: bytes) -> None:
        match FAULTS[data[0] % len(FAULTS)]:
            case "good":
                raise Refused(f"{folder / 'x'}: is refused in good words")
            case "exception":
                raise KeyError("x")
            case "broken promise":
                raise Wrong("it does not work")
            case "silent message":
                raise Refused("no")
            case "escapes":
                raise Refused(f"{folder / 'x'}: \x1b[2J")
            case "memory":
                _held.append(b"x" * (150 << 20))
            case "slow":
                end = time.process_time() + 0.5
                while time.process_time() < end:
                    pass
            case "canary":
                Path("CANARY").touch()
            case "end" if Path("crashed").exists():
                time.sleep(1000)
            case "end":
                Path("crashed").touch()
                os.kill(os.getpid(), signal.SIGSEGV)

    return run


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    """The next fault, in order."""
    mutate.turn += 1
    return bytes([mutate.turn % len(FAULTS)])


mutate.turn = -1
TARGET = Target(lambda: [b"\0"], mutate, prepare, (Refused,), lambda folder: str(folder), seconds=0.2, megabytes=100)

"""A target whose every input is a fault of another kind: what the harness must see."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random

from fuzz.target import Run, Target, Wrong

FAULTS = ["good", "exception", "broken promise", "silent message", "escapes", "memory", "slow", "canary", "crash", "hang"]
_held: list[bytearray] = []


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
                _held.append(bytearray(b"x" * (200 << 20)))
            case "slow":
                time.sleep(0.3)
            case "canary":
                Path("CANARY").touch()
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                time.sleep(1000)

    return run


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    """The next fault, in order; of the two that end the process either."""
    mutate.turn += 1
    return bytes([mutate.turn if mutate.turn < len(FAULTS) - 2 else random.choice((len(FAULTS) - 2, len(FAULTS) - 1))])


mutate.turn = -1
TARGET = Target(lambda: [b"\0"], mutate, prepare, (Refused,), lambda folder: str(folder), seconds=0.2, megabytes=100)

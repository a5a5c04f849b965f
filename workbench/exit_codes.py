"""How the program ends, for scripts. README and --help say the same."""
from __future__ import annotations


class Failed(Exception):
    """What was asked for cannot be had: the sentence for the person, and the code that the program ends with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


OK = 0
ENGINE_ERROR = 1
USAGE = 2
INCOMPATIBLE = 3
OUT_OF_MEMORY = 4
INTERRUPTED = 130

HELP = ("Exit codes: 0 ok, 1 engine error, 2 wrong usage, 3 model or adapter that cannot be used, 4 out of memory, 130 interrupted.")

"""What the engine's programs share: a question as JSON in the arguments, JSON lines as the answer, a sentence and a code without one."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

FAILED, WRONG_USAGE, CANNOT_BE_USED, OUT_OF_MEMORY = 1, 2, 3, 4
"""exit codes"""


def answer(run: Callable[..., dict[str, Any]], code: Callable[[Exception], int]) -> int:
    """Call `run` with the arguments on the command line; {"progress": text} now and then, then its result, on standard output.

    Returns the exit code: 0, OUT_OF_MEMORY, or what `code` makes of an exception, whose sentence then stands on standard error.
    """
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no part of the answer

    def say(data: dict[str, Any]) -> None:
        print(json.dumps(data), file=out, flush=True)

    try:
        say(run(**json.loads(sys.argv[1]), progress=lambda text: say({"progress": text})))
    except Exception as error:
        from .failures import out_of_memory, sentence  # it brings torch
        print(sentence(error), file=sys.stderr)
        return OUT_OF_MEMORY if out_of_memory(error) else code(error)
    return 0


def set_spins() -> None:
    """OpenMP as in the engine's own process; read when torch is imported."""
    from .__main__ import SPINS
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

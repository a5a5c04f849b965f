"""`lora-bench check`: the engine checks adapters in a child process; here the reports are shown."""
from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

import msgspec

from ..engine.protocol import CheckReport
from . import engine_tools, exit_codes, output
from .check_text import sections

NARROW, WIDE = 60, 120
"""columns of a report"""


def report(model: str | None, adapters: Sequence[str], effect: bool, device: str, dtype: str, weights: str, as_json: bool) -> int:
    """Check and print; returns the exit code: INCOMPATIBLE when one of the adapters cannot be used or changes nothing.

    Raises Failed when the model cannot be had.
    """
    request = {"model": model, "adapters": adapters, "effect": effect, "device": device, "dtype": dtype, "weights": weights}
    progress = output.ProgressLine()
    try:
        result = engine_tools.follow("check", json.dumps(request), progress.show)
    except exit_codes.Failed as failed:
        code = exit_codes.ENGINE_ERROR if model is None and failed.code == exit_codes.INCOMPATIBLE else failed.code
        raise exit_codes.Failed(str(failed), code) from failed
    finally:
        progress.clear()
    if as_json:
        output.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    else:
        reports = msgspec.convert(result["reports"], list[CheckReport])
        output.write("\n".join(_text(one, effect) for one in reports))
    return exit_codes.OK if result["usable"] else exit_codes.INCOMPATIBLE


def _text(one: CheckReport, effect: bool) -> str:
    width = min(max(shutil.get_terminal_size().columns, NARROW), WIDE)
    lines: list[str] = []
    for part in sections(one, width - 2, "" if effect else "not run (--no-effect)"):
        lines += [part.title, *(f"  {line}" for line in part.lines), ""]
    return "\n".join(lines)

"""Whether adapters can be used on a base, what they are and what they do to it.

`python -m lora_bench.engine.check '{"model": PATH, "adapters": [PATH, ...], ...}'`, with the arguments of `run_check`, prints JSON lines:
{"progress": text} now and then, the result last. Its exit code is 0 when the check was made, whatever it found.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .program import CANNOT_BE_USED, FAILED, answer, set_spins
from .protocol import CheckFailed, CheckFinished, CheckProgress, CheckReport, LoadModel, ModelLoading, plain_data

if TYPE_CHECKING:
    from .engine import Engine


class CheckError(RuntimeError):
    """The base is good, and yet a check could not be made to its end."""


def run_check(
    model: str | None, adapters: Sequence[str], effect: bool = True, device: str = "auto", dtype: str = "auto",
    weights: str = "auto", progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Reports on every adapter, one after the other on one base. Adapters that cannot be loaded have a report too.

    Raises ValueError or OSError for a base that cannot be loaded, OutOfMemory, CheckError.
    """
    from .engine import Engine  # it brings torch, which reads the environment when it is imported
    from .machine import use_cores
    events: list[Any] = []

    def emit(event: object) -> None:
        events.append(event)
        if isinstance(event, CheckProgress):
            progress(f"{event.name}: {event.text}")
        elif isinstance(event, ModelLoading):
            progress(f"{event.phase} {event.item}")

    engine = Engine(emit)
    use_cores()
    info = engine.load_model(LoadModel(model, device=device, dtype=dtype, weights=weights, host_cache_bytes=1 << 62))
    reports = []
    for path in adapters:
        progress(f"loading {path}")
        reports.append(_check_one(engine, events, path, effect))
        events.clear()
    return {"model": plain_data(info), "usable": all(report.usable for report in reports), "reports": plain_data(reports)}


def _check_one(engine: Engine, events: list[Any], path: str, effect: bool) -> CheckReport:
    """One adapter, loaded and unloaded again. Raises OutOfMemory, CheckError."""
    from .failures import OutOfMemory, out_of_memory, sentence
    from .report import report_refused
    try:
        name = engine.load_adapter(path).name
        engine.checks.ask(name, effect)
        while engine.checks.busy:
            engine.checks.advance()
    except (ValueError, OSError) as error:
        if out_of_memory(error):
            raise
        return report_refused(path, sentence(error), engine.model.info.name)
    engine.unload_adapter(name)
    answer = next(event for event in reversed(events) if isinstance(event, (CheckFinished, CheckFailed)))
    if isinstance(answer, CheckFailed):
        raise OutOfMemory(answer.message) if answer.out_of_memory else CheckError(f"{path}: the check failed: {answer.message}")
    return answer.report


def main() -> int:
    """The program; returns its exit code (see program.answer)."""
    return answer(run_check, lambda error: CANNOT_BE_USED if isinstance(error, (ValueError, OSError)) else FAILED)


if __name__ == "__main__":
    set_spins()
    sys.exit(main())

"""One prompt through all columns of a comparison, on the command line: rows of one batch, then the first reply read under every mix."""
from __future__ import annotations

from collections.abc import Sequence

from ..engine import protocol as p
from . import exit_codes
from .comparison import Reply, Round, Setup
from .comparison_row import Row
from .engine_run import EngineRun
from .exit_codes import Failed
from .text import counted


def ask_round(engine: EngineRun, setup: Setup, prompt: p.Prompt, number: int, mixes: Sequence[p.Mix], what: str) -> Round:
    """The replies of all columns to `prompt`, and the first one's text under `mixes`, those of the columns first.

    `number` counts the rounds of this engine from 0. What goes wrong with a reply stands in it; Failed is raised when the engine is gone,
    and when memory ran out.
    """
    first = 1 + number * len(setup.columns)
    rows = {first + i: Row(first + i, column) for i, column in enumerate(setup.columns)}
    engine.send(p.GenerateTogether(tuple(p.Generate(number, prompt, row.column.mix, setup.sampling) for number, row in rows.items())))
    said: set[str] = set()
    for event in engine.events():
        _take(engine, rows, event, said)
        tokens = sum(row.tokens for row in rows.values())
        engine.progress.show(f"{what}: {counted(tokens, 'token')}")
        if not any(row.active for row in rows.values()):
            break
    replies = tuple(row.reply for row in rows.values())
    for activations in dict.fromkeys(reply.activations for reply in replies):
        engine.warn_of_silent(activations, setup.adapters, "this prompt")
    scored, why_not = _score(engine, prompt, replies[0], mixes, number, what)
    return Round(prompt, replies, scored, why_not)


def _take(engine: EngineRun, rows: dict[int, Row], event: p.Event, said: set[str]) -> None:
    row = rows.get(getattr(event, "request_id", 0))
    if row is None:
        return
    row.take(event)
    if isinstance(event, p.RequestFailed) and event.out_of_memory:
        raise Failed(event.message, exit_codes.OUT_OF_MEMORY)
    if isinstance(event, p.RequestQueued) and event.because not in said:
        said.add(event.because)
        engine.warn(f"waiting: {event.because}")


def _score(
    engine: EngineRun, prompt: p.Prompt, first: Reply, mixes: Sequence[p.Mix], number: int, what: str,
) -> tuple[p.Scored | None, str]:
    """(the figures or None, why not)."""
    if first.failed or not first.ids:
        return None, "" if first.failed else "the first reply holds no token"
    engine.progress.show(f"{what}: reading the first reply under every mix")
    engine.send(p.Score(number, prompt, first.ids, tuple(mixes)))
    for event in engine.events():
        match event:
            case p.Scored():
                return event, ""
            case p.ScoreFailed():
                return None, event.message
    raise AssertionError("the events never end")

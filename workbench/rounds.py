"""One prompt through all columns of a comparison, on the command line: rows of one batch, then the first reply read under every mix."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..engine import protocol as p
from . import exit_codes
from .comparison import Round, Setup
from .comparison_row import Row
from .engine_run import EngineRun
from .exit_codes import Failed
from .text import counted


def ask_round(engine: EngineRun, setup: Setup, prompt: p.Prompt, number: int, what: str) -> Round:
    """The replies of all columns to `prompt`, without figures.

    `number` counts the rounds of this engine from 0. What goes wrong with a reply stands in it; Failed is raised when the engine is gone,
    and when memory ran out.
    """
    first = 1 + number * len(setup.columns)
    rows = {first + i: Row(first + i, column) for i, column in enumerate(setup.columns)}
    engine.send(p.GenerateTogether(tuple(p.Generate(number, prompt, row.column.mix, setup.sampling) for number, row in rows.items())))
    for event in engine.events():
        _take(rows, event)
        tokens = sum(row.tokens for row in rows.values())
        waits = next((f", waiting: {row.note}" for row in rows.values() if row.phase == "queued" and row.note), "")
        engine.progress.show(f"{what}: {counted(tokens, 'token')}{waits}")
        if not any(row.active for row in rows.values()):
            break
    replies = tuple(row.reply for row in rows.values())
    for activations in dict.fromkeys(reply.activations for reply in replies):
        engine.warn_of_silent(activations, setup.adapters, "this prompt")
    return Round(prompt, replies)


def score_round(engine: EngineRun, round: Round, mixes: Sequence[p.Mix], number: int, what: str) -> Round:
    """The round with the figures of its first reply's text under `mixes`, those of the columns first, or with why there are none."""
    first = round.replies[0]
    if first.failed:
        return round
    if not first.ids:
        return replace(round, score_failed="the first reply holds no token")
    engine.progress.show(f"{what}: reading the first reply under every mix")
    engine.send(p.Score(number, round.prompt, first.ids, tuple(mixes)))
    for event in engine.events():
        match event:
            case p.Scored():
                return replace(round, scored=event)
            case p.ScoreFailed():
                return replace(round, score_failed=event.message)
    raise AssertionError("the events never end")


def _take(rows: dict[int, Row], event: p.Event) -> None:
    row = rows.get(getattr(event, "request_id", 0))
    if row is None:
        return
    row.take(event)
    if isinstance(event, p.RequestFailed) and event.out_of_memory:
        raise Failed(event.message, exit_codes.OUT_OF_MEMORY)

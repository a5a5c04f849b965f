"""One prompt through all columns of a comparison, on the command line: rows of one batch, then the first reply read under every mix."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine import protocol as p
from . import exit_codes
from .comparison import Reply, Round, Setup
from .engine_run import EngineRun
from .exit_codes import Failed
from .text import counted


@dataclass
class _Row:
    """A reply as it comes."""

    text: str = ""
    pieces: list[str] = field(default_factory=list)
    started: p.RequestStarted | None = None
    finished: p.RequestFinished | None = None
    failed: str = ""

    @property
    def over(self) -> bool:
        return self.finished is not None or bool(self.failed)

    def reply(self) -> Reply:
        if self.finished is None:
            return Reply(failed=self.failed)
        start = self.started or p.RequestStarted(0, 0)
        end = self.finished
        return Reply(self.text, end.ids, tuple(self.pieces), end.reason, end.stats, start.activations, start.cache)


def ask_round(engine: EngineRun, setup: Setup, prompt: p.Prompt, number: int, mixes: Sequence[p.Mix], what: str) -> Round:
    """The replies of all columns to `prompt`, and the first one's text under `mixes`, those of the columns first.

    `number` counts the rounds of this engine from 0. What goes wrong with a reply stands in it; Failed is raised when the engine is gone,
    and when memory ran out.
    """
    first = 1 + number * len(setup.columns)
    rows = {first + i: _Row() for i in range(len(setup.columns))}
    engine.send(p.GenerateTogether(tuple(
        p.Generate(request, prompt, column.mix, setup.sampling) for request, column in zip(rows, setup.columns, strict=True))))
    said: set[str] = set()
    for event in engine.events():
        _take(engine, rows, event, said)
        tokens = sum(len(row.pieces) for row in rows.values())
        engine.progress.show(f"{what}: {counted(tokens, 'token')}")
        if all(row.over for row in rows.values()):
            break
    replies = tuple(row.reply() for row in rows.values())
    for activations in dict.fromkeys(reply.activations for reply in replies):
        engine.warn_of_silent(activations, setup.adapters, "this prompt")
    scored, why_not = _score(engine, prompt, replies[0], mixes, number, what)
    return Round(prompt, replies, scored, why_not)


def _take(engine: EngineRun, rows: dict[int, _Row], event: p.Event, said: set[str]) -> None:
    row = rows.get(getattr(event, "request_id", 0))
    if row is None:
        return
    match event:
        case p.RequestQueued() if event.because not in said:
            said.add(event.because)
            engine.warn(f"waiting: {event.because}")
        case p.RequestStarted():
            row.started = row.started or event  # what it found when it began; later ones follow a preemption
        case p.TextDelta():
            row.text += event.text
            row.pieces += [""] * (event.tokens - 1 - len(row.pieces)) + [event.text]
        case p.RequestFinished():
            row.finished = event
        case p.RequestFailed(out_of_memory=True):
            raise Failed(event.message, exit_codes.OUT_OF_MEMORY)
        case p.RequestFailed():
            row.failed = event.message


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

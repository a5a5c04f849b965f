"""Texts to score, one after the other in the order they were asked for: a piece after every step of the engine."""
from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from .failures import out_of_memory, sentence
from .fetches import Want
from .protocol import Emit, Score, Scored, ScoreFailed
from .request import Request
from .score import Reading

if TYPE_CHECKING:
    from .engine import Engine

MAX_WAITING = 100
STOPPED = "the reading of the text was stopped"


class Scores:
    """The scores of one engine. Each is answered by Scored or ScoreFailed."""

    def __init__(self, engine: Engine, emit: Emit) -> None:
        self._engine, self._emit = engine, emit
        self._queue: deque[Score] = deque()
        self._now: tuple[Score, Reading, Generator[None, None, Scored]] | None = None

    @property
    def busy(self) -> bool:
        """Whether `advance` would compute something: the next one may have to wait for adapters that are read."""
        return (self._now is not None or bool(self._queue)) and not self._engine.model.store.lacking(self._needs())

    def wanted(self) -> list[Want]:
        """The adapters of what is read next."""
        return [Want(self._needs(), "the reading of a text")]

    @property
    def requests(self) -> Sequence[Request]:
        """The rows that are read now: they hold slots and KV memory."""
        return self._now[1].requests if self._now else ()

    def ask(self, command: Score) -> None:
        """Queue a score. Raises ValueError when no base is loaded, or too many wait."""
        self._engine.model  # noqa: B018 - raises without one
        if len(self._queue) >= MAX_WAITING:
            raise ValueError(f"{MAX_WAITING} texts wait to be scored already; ask again when they are done")
        self._queue.append(command)

    def advance(self) -> None:
        """Compute the next piece, at most about as long as a step. Failures are events."""
        command = self._now[0] if self._now else self._queue.popleft()
        try:
            if self._now is None:
                reading = Reading(self._engine, command)
                self._now = command, reading, reading.steps()
            next(self._now[2])
        except StopIteration as done:
            self._now = None
            self._emit(done.value)
        except Exception as error:
            self._now = None
            self._emit(ScoreFailed(command.score_id, sentence(error), out_of_memory(error)))

    def cancel(self, score_id: int) -> bool:
        """Give up the score of that number, running or waiting; False when there is none."""
        there = [command for command in self._queue if command.score_id == score_id]
        self._queue = deque(command for command in self._queue if command.score_id != score_id)
        if self._now is not None and self._now[0].score_id == score_id:
            self._now[2].close()
            there, self._now = [self._now[0], *there], None
        for _ in there:
            self._emit(ScoreFailed(score_id, STOPPED, cancelled=True))
        return bool(there)

    def _needs(self) -> Sequence[str]:
        if self._now is not None:
            return self._now[1].needs
        return _names(self._queue[0]) if self._queue else ()

    def drop(self, because: str) -> None:
        """End every score, told with the cause."""
        if self._now is not None:
            command, _, steps = self._now
            steps.close()
            self._queue.appendleft(command)
        self._now = None
        for command in self._queue:
            self._emit(ScoreFailed(command.score_id, because))
        self._queue.clear()


def _names(command: Score) -> list[str]:
    return list(dict.fromkeys(use.name for mix in command.mixes for use in mix if use.scale != 0))

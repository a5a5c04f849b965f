"""Checks of loaded adapters, made between the steps of the engine: one piece at a time, in the order they were asked for."""
from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from .deltas import WeightSquares
from .failures import out_of_memory, sentence
from .mix import unknown_adapter
from .protocol import CheckFailed, CheckFinished, CheckProgress, CheckReport, Emit
from .report import check_loaded

if TYPE_CHECKING:
    from .engine import Engine

STOPPED = "the check was stopped"
Work = Generator[str, None, CheckReport]


class Checks:
    """The checks of one engine. What happens is told by CheckProgress, CheckFinished and CheckFailed."""

    def __init__(self, engine: Engine, emit: Emit) -> None:
        self._engine, self._emit = engine, emit
        self._queue: dict[str, bool] = {}
        """adapters to check, oldest first, and whether with an effect run"""
        self._now: tuple[str, Work] | None = None
        self._said = ""
        self._squares: WeightSquares | None = None

    @property
    def busy(self) -> bool:
        return self._now is not None or bool(self._queue)

    @property
    def under_way(self) -> bool:
        """Whether one has begun: it may hold slots and KV memory."""
        return self._now is not None

    def ask(self, name: str, effect: bool) -> None:
        """Queue a check of the loaded adapter `name`; asked for twice it is made once. Raises ValueError for one that is not loaded."""
        if name not in (known := self._engine.model.store.infos):
            raise ValueError(unknown_adapter(name, known))
        self._queue[name] = self._queue.get(name, False) or effect

    def advance(self) -> None:
        """Compute the next piece, about as long as a step. Failures are events."""
        if self._now is None:
            name = next(iter(self._queue))
            self._now = name, check_loaded(self._engine, name, self._queue.pop(name), self._base_squares())
        name, work = self._now
        try:
            self._say(name, next(work))
        except StopIteration as done:
            self._now = None
            self._emit(CheckFinished(name, done.value))
        except Exception as error:
            self._now = None
            self._emit(CheckFailed(name, sentence(error), out_of_memory(error)))

    def cancel(self, name: str) -> bool:
        """Give up the check of `name`, running or waiting; False when there is none."""
        there = self._queue.pop(name, None) is not None
        if self._now is not None and self._now[0] == name:
            self._now[1].close()
            self._now, there = None, True
        if there:
            self._emit(CheckFailed(name, STOPPED, cancelled=True))
        return there

    def drop(self, because: str) -> None:
        """End every check, told with the cause."""
        names = [self._now[0]] if self._now else []
        if self._now:
            self._now[1].close()
        for name in [*names, *self._queue]:
            self._emit(CheckFailed(name, because))
        self._now, self._squares = None, None
        self._queue.clear()

    def _say(self, name: str, text: str) -> None:
        if text != self._said:
            self._said = text
            self._emit(CheckProgress(name, text))

    def _base_squares(self) -> WeightSquares:
        decoder = self._engine.model.runner.decoder
        if self._squares is None or self._squares.decoder is not decoder:
            self._squares = WeightSquares(decoder)
        return self._squares

"""Checks of loaded adapters, made between the steps of the engine: one piece at a time, in the order they were asked for."""
from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .beside import Beside
from .deltas import WeightSquares
from .failures import out_of_memory, sentence
from .fetches import Want
from .mix import unknown_adapter
from .protocol import CheckFailed, CheckFinished, CheckProgress, CheckReport, Emit
from .report import OfDisk, check_loaded, read_for_check

if TYPE_CHECKING:
    from .engine import Engine

STOPPED = "the check was stopped"


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    work: Generator[str, None, CheckReport]
    needs: tuple[str, ...]
    """what it needs in slots from time to time"""


@dataclass(frozen=True, slots=True)
class _Reads:
    name: str
    digest: str
    work: Beside[OfDisk]


class Checks:
    """The checks of one engine. What happens is told by CheckProgress, CheckFinished and CheckFailed."""

    def __init__(self, engine: Engine, emit: Emit, wake: Callable[[], None] | None) -> None:
        """`wake`: see Engine; with it a check reads beside the loop."""
        self._engine, self._emit, self._wake = engine, emit, wake
        self._queue: dict[str, bool] = {}
        """adapters to check, oldest first, and whether with an effect run"""
        self._reads: _Reads | None = None
        """for the first of the queue"""
        self._now: _Check | None = None
        self._said = ""
        self._squares: WeightSquares | None = None

    @property
    def busy(self) -> bool:
        """Whether `advance` would compute something."""
        if self._now is not None:
            return not self._engine.model.store.lacking(self._now.needs)
        return bool(self._queue) and (self._reads is None or self._reads.work.outcome is not None)

    @property
    def under_way(self) -> bool:
        """Whether one has begun: it may hold slots and KV memory."""
        return self._now is not None

    def wanted(self) -> list[Want]:
        """The adapter of the one under way."""
        return [Want(self._now.needs, f"the check of {self._now.name}")] if self._now is not None else []

    def ask(self, name: str, effect: bool) -> None:
        """Queue a check of the loaded adapter `name`; asked for twice it is made once. Raises ValueError for one that is not loaded."""
        if name not in (known := self._engine.model.store.infos):
            raise ValueError(unknown_adapter(name, known))
        self._queue[name] = self._queue.get(name, False) or effect

    def advance(self) -> None:
        """Compute the next piece, about as long as a step. Failures are events."""
        name = self._now.name if self._now is not None else next(iter(self._queue))
        try:
            if self._now is None and not self._begin(name):
                return
            self._say(name, next(self._now.work))
        except StopIteration as done:
            self._now = None
            self._emit(CheckFinished(name, done.value))
        except Exception as error:
            self._now = None
            self._queue.pop(name, None)
            self._emit(CheckFailed(name, sentence(error), out_of_memory(error)))

    def cancel(self, name: str) -> bool:
        """Give up the check of `name`, running or waiting; False when there is none."""
        there = self._queue.pop(name, None) is not None
        if self._reads is not None and self._reads.name == name:
            self._stop_reading()
        if self._now is not None and self._now.name == name:
            self._now.work.close()
            self._now, there = None, True
        if there:
            self._emit(CheckFailed(name, STOPPED, cancelled=True))
        return there

    def drop(self, because: str) -> None:
        """End every check, told with the cause."""
        self._stop_reading()
        names = [self._now.name] if self._now else []
        if self._now:
            self._now.work.close()
        for name in [*names, *self._queue]:
            self._emit(CheckFailed(name, because))
        self._now, self._squares = None, None
        self._queue.clear()

    def _begin(self, name: str) -> bool:
        """The check of `name` is under way once what it has of the disk is there. Raises AdapterError when that cannot be had."""
        store = self._engine.model.store
        read = partial(read_for_check, store.reader(name), store.infos[name])
        if self._wake is None:
            of_disk = read(lambda done, total: None, lambda: False)
        elif self._reads is None:
            self._reads = _Reads(name, store.infos[name].digest, Beside(read, self._wake))
            return False
        elif (of_disk := self._reads.work.outcome) is None:
            return False
        else:
            digest, self._reads = self._reads.digest, None
            if digest != store.infos[name].digest:
                return False
            if isinstance(of_disk, Exception):
                raise of_disk
        effect = self._queue.pop(name)
        self._now = _Check(name, check_loaded(self._engine, name, of_disk, effect, self._base_squares()), (name,) if effect else ())
        return True

    def _stop_reading(self) -> None:
        if self._reads is not None:
            self._reads.work.cancel()
            self._reads = None

    def _say(self, name: str, text: str) -> None:
        if text != self._said:
            self._said = text
            self._emit(CheckProgress(name, text))

    def _base_squares(self) -> WeightSquares:
        decoder = self._engine.model.runner.decoder
        if self._squares is None or self._squares.decoder is not decoder:
            self._squares = WeightSquares(decoder)
        return self._squares

"""A trace of the next step: what ran in it, by the names of its kernels or ops."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..kernels.recording import NameTimes, Ran, Recorder, times
from .failures import sentence
from .protocol import Emit, Event, StepTraced, TracedOp, TraceFailed
from .request import Request
from .runner import Runner
from .scheduler import Work

MOST_OPS = 200
"""names that are told one by one; those that took least are one line together"""
MOST_NAME = 400
"""characters of a name"""
Drawn = list[tuple[Request, int]]


class Traces:
    """Runs the steps of an engine, and records the next one when that is wanted; that is answered by StepTraced or TraceFailed."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._wanted = False

    def ask(self) -> None:
        """Trace the next step; asked for again before it comes that is one trace."""
        self._wanted = True

    def drop(self, because: str) -> None:
        """Give up what was asked for, told with the cause."""
        self._fail(because)

    def run(self, runner: Runner, works: Sequence[Work], meanwhile: Callable[[], None]) -> tuple[Drawn, list[Callable[[], Event]]]:
        """One step, as `runner` runs it. Returns every request that got a token with it, and what makes the events of the step."""
        if not self._wanted:
            drawn, finished = runner.run(works, meanwhile)
            return drawn, [finished]
        before, graphs = time.perf_counter(), runner.graphs
        runner.only_the_step()
        recorder = self._start(Recorder(runner.decoder.device))
        began = time.perf_counter()
        try:
            drawn, finished = runner.run(works, meanwhile)
        except Exception as error:
            self._fail(f"the step failed: {sentence(error)}")
            raise
        finally:
            ended = time.perf_counter()
            ran = self._stop(recorder) if recorder is not None else []
        if not ran or runner.graphs != graphs:  # what prepares a graph is not the step: the next one will do
            return drawn, [finished]
        self._wanted = False
        step, found = finished(), times(ran)
        cost = time.perf_counter() - before - (ended - began)
        traced = StepTraced(step, runner.decoder.device.type, (ended - began) * 1e3, found.busy / 1e6, cost * 1e3, _ops(found.by_name))
        return drawn, [lambda: step, lambda: traced]

    def _start(self, recorder: Recorder) -> Recorder | None:
        try:
            recorder.start()
        except RuntimeError as error:
            self._fail(f"torch's profiler could not be started: {sentence(error)}")
            return None
        return recorder

    def _stop(self, recorder: Recorder) -> list[Ran]:
        try:
            ran = recorder.stop()
        except RuntimeError as error:
            self._fail(f"torch's profiler broke off: {sentence(error)}")
            return []
        if not ran:
            self._fail("torch's profiler recorded nothing: another profiler may hold the device, or its driver may allow profiling to "
                       "administrators alone")
        return ran

    def _fail(self, message: str) -> None:
        if self._wanted:
            self._wanted = False
            self._emit(TraceFailed(message))


def _ops(by_name: Sequence[NameTimes]) -> tuple[TracedOp, ...]:
    rest = by_name[MOST_OPS:]
    more = NameTimes(f"{len(rest)} other names", sum(one.calls for one in rest), sum(one.own for one in rest),
                     sum(one.beside for one in rest))
    return tuple(TracedOp(one.name[:MOST_NAME], one.calls, one.own / 1e3, one.beside / 1e3)
                 for one in (*by_name[:MOST_OPS], *([more] if rest else ())))

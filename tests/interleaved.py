"""Programs of a launch that run at once: Triton's interpreter takes one after the other, which hides what they need of each other.

Here they take turns at random wherever they touch memory, some more often than others, `resident` of them at a time, begun in the order
of the grid. What one stores the others see late and in any order, but for what stands before an atomic operation that releases it.
"""
from __future__ import annotations

import inspect
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np

MOST_TURNS = 400_000
"""of a launch: programs that wait for each other take turns for ever"""


class _Program(threading.Thread):
    def __init__(self, launch: _Launch, place: tuple[int, ...]) -> None:
        super().__init__(daemon=True)
        self.launch, self.place, self.turn = launch, place, threading.Semaphore(0)
        self.speed = 100 ** -launch.chance.random()
        self.stored: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """what others do not see yet: addresses, values, which of them"""

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.launch.resume(self)
            self.launch.body()
        except BaseException as exception:  # noqa: BLE001
            self.launch.failed = self.launch.failed or exception
        self.launch.leave(self)


class _Launch:
    def __init__(self, body: Callable[[], None], grid: tuple[int, ...], chance: random.Random, resident: int) -> None:
        self.body, self.failed, self.done = body, None, threading.Event()
        self.chance, self._turns, self._seen = chance, 0, chance.choice((0.001, 0.1))
        self._coming = [_Program(self, place) for place in product(*map(range, grid))]
        self._left: list[_Program] = []
        self._here: list[_Program] = []
        for _ in range(resident):
            self._admit()

    def begin(self) -> None:
        self._next().turn.release()

    def resume(self, program: _Program) -> None:
        _builder().set_grid_idx(*program.place)
        self.now = program

    def take_turns(self, waits: bool = False) -> _Program:
        """Before this program touches memory others may; the program. Where it `waits` for what is stored, that is seen sooner."""
        own, other = self.now, self._next()
        self._turns += 1
        for program in (*self._here, *self._left):
            if program.stored and self.chance.random() < (max(self._seen, 0.05) if waits else self._seen):
                _store(*program.stored.pop(self.chance.randrange(len(program.stored))))
        if other is not own:
            other.turn.release()
            own.turn.acquire()
            self.resume(own)
        if self.failed is not None or self._turns > MOST_TURNS:
            raise self.failed or AssertionError(f"{len(self._here)} programs wait, {len(self._coming)} are to come")
        return own

    def leave(self, program: _Program) -> None:
        self._here.remove(program)
        self._left.append(program)
        self._admit()
        if self._here:
            self._next().turn.release()
        else:
            for each in self._left:
                flush(each)
            self.done.set()

    def _admit(self) -> None:
        if self._coming:
            self._here.append(self._coming.pop(0))
            self._here[-1].start()

    def _next(self) -> _Program:
        return self.chance.choices(self._here, [program.speed for program in self._here])[0]


def flush(program: _Program, where: np.ndarray | None = None) -> None:
    """What `program` has stored is seen by all, or what lies at addresses `where`."""
    kept = []
    for part in program.stored:
        if where is None or np.isin(part[0], where).any():
            _store(*part)
        else:
            kept.append(part)
    program.stored[:] = kept


def _builder() -> Any:
    from triton.runtime.interpreter import interpreter_builder

    return interpreter_builder


def _store(addresses: np.ndarray, values: np.ndarray, which: np.ndarray) -> None:
    from triton._C.libtriton import interpreter

    interpreter.store(addresses, values, which)


@contextmanager
def interleaved(seed: int, resident: int) -> Iterator[None]:
    """Launches within have their programs run so."""
    from triton.runtime import interpreter

    builder, chance, launches = interpreter.interpreter_builder, random.Random(seed), []
    usual = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw")}

    def load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        flush(launches[-1].take_turns(waits=bool(rest[-1])), ptrs.data[mask.data])  # who waits reads as volatile
        return usual["create_masked_load"](ptrs, mask, *rest)

    def store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> None:
        launches[-1].take_turns().stored.append((ptrs.data.copy(), value.data.copy(), mask.data.copy()))

    def rmw(op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        program = launches[-1].take_turns()
        if "REL" in str(sem).upper() and "RELAXED" not in str(sem).upper():
            flush(program)
        return usual["create_atomic_rmw"](op, ptr, value, mask, sem, scope)

    def call(executor: Any, *given: Any, **options: Any) -> None:
        names = inspect.getfullargspec(executor.fn)
        options = {key: value for key, value in options.items() if key in names.args or key in names.kwonlyargs}
        patched = interpreter._patch_lang(executor.fn)
        try:
            args = inspect.getcallargs(executor.fn, *given, **options)
            args = {name: arg if name in executor.constexprs else interpreter._implicit_cvt(arg) for name, arg in args.items()}
            grid = (*executor.grid, 1, 1)[:3]
            builder.set_grid_dim(*grid)
            launches.append(_Launch(lambda: executor.fn(**args), grid, chance, min(resident, math.prod(grid))))
            launches[-1].begin()
            launches[-1].done.wait()
            if (failed := launches.pop().failed) is not None:
                raise failed
        finally:
            patched.restore()

    before = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = call
    for name, replacement in zip(usual, (load, store, rmw), strict=True):
        setattr(builder, name, replacement)
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = before
        for name in usual:
            delattr(builder, name)

"""Threads that compute a function together, without Python between its parts."""
from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from .compiled import inner, make_ready
from .vectors import fetch_add, give_way, read, sleep, write

SPINS = 4000
"""that a thread looks for the others before it lets another one have its core: some ten microseconds"""
YIELDS, SLEEP = 1000, 50
"""after as many times of that, it sleeps for some microseconds at a time: onto a core that is idle the system brings a thread that waits
for one elsewhere, where another program is busy"""
ARRIVED, ROUND = 0, 8
"""places in `Team.sync`: how many threads are at the barrier, how often all were; on cache lines of their own"""


class Team:
    """`threads` of them, the caller's among them. They live as long as the process and sleep between calls."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sync = np.zeros(16, np.int64)
        self._turn = threading.Lock()
        self._jobs = [SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]]() for _ in range(threads - 1)]
        for number, jobs in enumerate(self._jobs, 1):
            threading.Thread(target=self._work, args=(number, jobs), name=f"cpu-{number}", daemon=True).start()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """function(thread, threads, sync, *arguments) in all threads: compiled without the GIL, it ends with `meet`.

        One caller after another: an adapter is made ready beside the steps, with the numbers of packed weights.
        """
        with self._turn:
            self._make_ready(function, arguments)
            for jobs in self._jobs:
                jobs.put((function, arguments))
            function(0, self.threads, self.sync, *arguments)

    def alone(self, function: Callable[..., None], *arguments: Any) -> None:
        """`run` in the caller's thread only."""
        self._make_ready(function, arguments)
        function(0, 1, self.sync, *arguments)

    def _make_ready(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Before other threads wait for it: what cannot be compiled is said here."""
        if not getattr(function, "overloads", True):
            make_ready(function, (0, self.threads, self.sync, *arguments))

    def _work(self, number: int, jobs: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        while True:
            function, arguments = jobs.get()
            function(number, self.threads, self.sync, *arguments)
            del function, arguments


@inner
def meet(sync, threads):
    """Wait until all threads are here; each then sees what the others wrote."""
    if threads == 1:
        return
    arrived, turn = sync.ctypes.data + 8 * ARRIVED, sync.ctypes.data + 8 * ROUND
    now = read(turn)
    if fetch_add(arrived, 1) == threads - 1:
        write(arrived, 0)
        fetch_add(turn, 1)
        return
    spins = 0
    while read(turn) == now:
        spins += 1
        if spins > SPINS + YIELDS:
            sleep(np.int32(SLEEP))
        elif spins > SPINS:
            give_way()


@inner
def portion(tasks, threads):
    """How many of `tasks` that follow each other a thread had best take at once: memory is read faster in long pieces, and yet all threads
    should end together."""
    for count in range(tasks // (3 * threads), 1, -1):
        if tasks % (count * threads) == 0:
            return count
    return max(1, tasks // (8 * threads))


@inner
def take(counters, index, count):
    """The first of `count` tasks that nobody has taken yet of those that `counters[index]` counts."""
    return fetch_add(counters.ctypes.data + 8 * index, count)

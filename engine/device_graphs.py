"""Decode steps as CUDA graphs: captured once for each number of rows, with and without adapters, replayed ever after."""
from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .failures import sentence
from .protocol import Emit, GraphCaptured, GraphCapturing


class NoGraph(RuntimeError):
    """A step that cannot be captured; the text says why."""


class DecodeGraphs:
    """Graphs by (rows, whether adapters act), their memory shared. What a graph reads and writes must stay where it is."""

    def __init__(self, device: torch.device, emit: Emit) -> None:
        self._device, self._emit = device, emit
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._problem = ""

    def __contains__(self, key: tuple[int, bool]) -> bool:
        """Whether `run` would capture nothing."""
        return self._pool is None or key in self._graphs

    def run(self, key: tuple[int, bool], step: Callable[[], None]) -> None:
        """`step`, which must do the same for the same `key` whenever it is called, on numbers that may differ.

        On a CUDA device it is called twice for a new one: to compile its kernels, and to be captured; then its graph runs, as it does
        each time. Raises NoGraph when that failed, now or before.
        """
        if self._pool is None:
            step()
            return
        if self._problem:
            raise NoGraph(self._problem)
        if key not in self._graphs:
            self._graphs[key] = self._captured(*key, step)
        self._graphs[key].replay()

    def _captured(self, rows: int, adapters: bool, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self._emit(GraphCapturing(rows, adapters))
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        try:
            beside = torch.cuda.Stream(self._device)
            beside.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(beside):
                step()
            torch.cuda.current_stream(self._device).wait_stream(beside)
            torch.cuda.synchronize(self._device)
            # threads that bring adapters nearer allocate meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=beside, capture_error_mode="thread_local"):
                step()
        except Exception as error:
            self._problem = f"the decode step of {rows} rows could not be captured: {sentence(error)}"
            self._emit(GraphCaptured(rows, adapters, (time.perf_counter() - began) * 1e3, self._problem))
            raise NoGraph(self._problem) from error
        self._emit(GraphCaptured(rows, adapters, (time.perf_counter() - began) * 1e3))
        return graph

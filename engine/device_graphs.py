"""Decode steps as CUDA graphs: each kind is captured once, replayed ever after."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .device_capture import captured
from .failures import sentence
from .models.own_rows import Gates
from .protocol import Emit, GraphCaptured, GraphCapturing


class NoGraph(RuntimeError):
    """A step that cannot be captured; the text says why."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells the graph of one step from that of another."""

    rows: int
    adapters: bool
    """act on some of them"""
    own: bool = False
    """some of these change single rows besides rank rows"""
    gates: Gates = ""
    """which rows they change at gate or up"""
    late: bool = False
    """others follow a DoRA in the mix of a row"""

    @property
    def more(self) -> str:
        """What of it is more than low rank, in words, "" for nothing."""
        gates = {"": "", "some": ", also at the gate of some rows", "all": ", also at the gate of all rows"}[self.gates]
        return f"adapters that are more than low rank{gates}{', others behind a DoRA' if self.late else ''}" if self.own else ""


class DecodeGraphs:
    """Graphs by kind, their memory shared. What a graph reads and writes must stay where it is."""

    def __init__(self, device: torch.device, emit: Emit) -> None:
        self._device, self._emit = device, emit
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._problems: dict[Kind, str] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __contains__(self, kind: Kind) -> bool:
        """Whether `run` would capture nothing."""
        return self._pool is None or kind in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, kind: Kind, step: Callable[[], None]) -> None:
        """`step`, which must do the same for the same `kind` whenever it is called, on numbers that may differ.

        On a CUDA device it is called twice for a new kind: to compile its kernels, and to be captured; then its graph runs, as it does
        each time. Raises NoGraph when that failed, now or before.
        """
        graph = self._graphs.get(kind)
        if graph is not None:
            graph.replay()
        elif self._pool is None:
            step()
        elif kind in self._problems:
            raise NoGraph(self._problems[kind])
        else:
            graph = self._graphs[kind] = self._captured(kind, step)
            graph.replay()

    def _captured(self, kind: Kind, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self._emit(GraphCapturing(kind.rows, kind.adapters, kind.more))
        began = time.perf_counter()
        try:
            graph = captured(self._device, self._pool, step)
        except Exception as error:
            self._pool = torch.cuda.graph_pool_handle()
            problem = self._problems[kind] = f"the decode step of {kind.rows} rows could not be captured: {sentence(error)}"
            self._emit(GraphCaptured(kind.rows, kind.adapters, kind.more, (time.perf_counter() - began) * 1e3, problem))
            raise NoGraph(problem) from error
        self._emit(GraphCaptured(kind.rows, kind.adapters, kind.more, (time.perf_counter() - began) * 1e3))
        return graph


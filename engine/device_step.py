"""Decode steps that run on the device from the upload of their rows to the tokens drawn: under a CUDA graph where there is one."""
from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels.greedy import GreedyWork, greedy
from ..kernels.packed import PackedWeight
from ..kernels.sampling import sample
from ..kernels.stamps import Stamps
from ..kernels.triton_compat import HAS_TRITON
from .adapter_share import AdapterShare
from .adapter_store import AdapterStore
from .blocks import blocks_for
from .device_graphs import DecodeGraphs, NoGraph
from .device_rows import StepRows
from .models.decode_forward import NO_RANKS, DecodeForward, DecodeStep
from .models.decoder import Decoder
from .page_lists import LIST_WORDS
from .page_table import PageTable
from .protocol import GRAPH_OPS, Emit
from .request import Request
from .routing import Routing

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""rows of a graph; those beyond a step's are empty"""
STAMPS_A_LAYER = 8


def device_obstacle(decoder: Decoder) -> str:
    """Why the decode steps of this base cannot run so, "" when they can."""
    if decoder.device.type == "cuda" and not HAS_TRITON:
        return "Triton is not installed"
    matrices = [decoder.head.weight, *(linear.weight for layer in decoder.layers for linear in layer.linears)]
    if any(isinstance(matrix, PackedWeight) for matrix in matrices):
        return "some weights are packed in a way that no decode kernel reads"
    return ""


class DeviceStep:
    """Steps of one base in which every request computes one token and draws the next. `begin` launches one, `end` waits for it."""

    def __init__(self, decoder: Decoder, store: AdapterStore, caches: Tensor, max_running: int, emit: Emit) -> None:
        """The base must have no `device_obstacle`; `caches` as Decoder.kv_cache makes them; `emit` hears of graphs."""
        device, facts = decoder.device, decoder.facts
        most = next(rows for rows in BUCKETS if rows >= min(max_running, BUCKETS[-1]))
        pinned = device.type == "cuda"
        self._decoder, self._store, self._most = decoder, store, most
        self._rows = StepRows(most, blocks_for(decoder.context), device)
        self._lists = torch.zeros(PageTable.linears(facts), LIST_WORDS, dtype=torch.int32, pin_memory=pinned)
        self._device_lists = torch.zeros_like(self._lists, device=device)
        self._pages = PageTable(facts, self._lists.numpy(), self._rows.weights)
        self._results = torch.zeros(most + STAMPS_A_LAYER * (facts.layers + 1), dtype=torch.int64, device=device)
        """the tokens, then the stamps"""
        self._host_results = torch.zeros_like(self._results, device="cpu", pin_memory=pinned)
        self._stamps = Stamps(self._results[most:])
        self._greedy = GreedyWork(most, device)
        self._forward = DecodeForward(decoder, caches, most, self._stamps)
        self._graphs = DecodeGraphs(device, emit)
        self._done = torch.cuda.Event() if pinned else None
        self._share = AdapterShare(len(GRAPH_OPS))
        self._without: np.ndarray | None = None
        """times of the launched step without its adapters, where they were looked at"""
        self._launched: Sequence[Request] = ()
        self._began = 0.0
        self._acting: dict[str, str] = {}
        self._routing: Routing | None = None
        self._steps: dict[tuple[int, bool], DecodeStep] = {}
        """by rows, and whether adapters act"""

    def warm_up(self) -> None:
        """Prepare steps of one row without adapters, by one without a request."""
        self._launch(1, False)

    def begin(self, requests: Sequence[Request]) -> str:
        """Launch the step of `requests`. Returns "", or why it cannot run so; then nothing was launched."""
        self._began = time.perf_counter()
        if len(requests) > self._most:
            return f"{len(requests)} requests, at most {self._most} run in a graph"
        changed = self._rows.fill(requests, self._decoder.rope.start)
        if why := self._compose(requests, changed):
            return why
        self._rows.upload_tables()
        self._without = self._run_without_adapters(len(requests))
        if why := self._launch(len(requests), self._routing is not None):
            return why
        self._launched = requests
        return ""

    @property
    def routing(self) -> Routing | None:
        """The adapters of the step that was launched last."""
        return self._routing

    def end(self) -> tuple[list[int], float, dict[str, float]]:
        """Of the step that `begin` launched: a token for each of its requests, -1 where logits are not finite; milliseconds of it all, and
        by GRAPH_OPS (see StepFinished)."""
        self._wait()
        requests = self._launched
        tokens = self._host_results[: len(requests)].tolist()
        draws = {row: request.draw(self._decoder.device) for row, request in enumerate(requests) if not _is_greedy(request)}
        drawing = time.perf_counter()
        if draws:
            rows = torch.tensor(list(draws), device=self._decoder.device)
            for row, token in zip(draws, sample(self._forward.logits[rows], list(draws.values())), strict=True):
                tokens[row] = token
        now = time.perf_counter()
        return tokens, (now - self._began) * 1e3, self._by_op((now - self._began) * 1e3, (now - drawing) * 1e3)

    def _by_op(self, ms: float, drawing: float) -> dict[str, float]:
        """What the stamps say of the step, and what they and the ms of `drawing` behind it leave of its `ms`."""
        lasted = self._lasted()
        adapters = 0.0
        if self._routing is not None:
            if self._without is not None:
                self._share.measured(self._without, lasted)
            lasted, adapters = self._share.split(lasted)
        by_op = dict(zip(GRAPH_OPS, lasted.tolist(), strict=True))
        by_op["adapters"] = adapters
        by_op["sampling"] += drawing
        by_op["gaps"] = ms - sum(by_op.values())
        return by_op

    def _lasted(self) -> np.ndarray:
        return self._stamps.sums(self._host_results[self._most :].numpy(), GRAPH_OPS)

    def _run_without_adapters(self, count: int) -> np.ndarray | None:
        """Now and then: the step as it would be without adapters, for its times [ops] ms, which are not counted. What it leaves in the
        cache is written over by the step itself."""
        key = (count, *self._acting)
        if self._routing is None or not self._stamps.live or not self._share.due(key):
            return None
        captured = (_bucket(count), False) in self._graphs
        if not captured:
            self._device_lists.zero_()  # the graph with adapters, of which none acts
        self._launch(count, not captured)
        self._wait()
        self._device_lists.copy_(self._lists, non_blocking=True)
        self._began = time.perf_counter()
        return self._lasted()

    def _wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def _compose(self, requests: Sequence[Request], changed: bool) -> str:
        """Make the adapters that act on the rows those of the step. Returns "", or why they cannot be."""
        uses = self._rows.uses
        if changed:
            self._acting = {use.name: use.digest for row in uses for use in row}
            self._store.check_holds(self._acting)
        self._routing = self._store.routing(self._acting) if self._acting else None
        if self._routing is None:
            return ""
        if self._routing.obstacle:
            return self._routing.obstacle
        if composed := self._pages.compose(self._routing):
            self._device_lists.copy_(self._lists, non_blocking=True)
        if changed or composed:
            for row, (request, active) in enumerate(zip(requests, uses, strict=True)):
                self._pages.fill(row, active, len(request.ids) - 1)
        return ""

    def _launch(self, count: int, adapters: bool) -> str:
        key = _bucket(count), adapters
        if key not in self._steps:
            self._steps[key] = self._inputs(*key)
        try:
            self._graphs.run(key, lambda: self._step(self._steps[key]))
        except NoGraph as failed:
            return str(failed)
        if self._done is not None:
            self._done.record()
        return ""

    def _inputs(self, rows: int, adapters: bool) -> DecodeStep:
        weights = self._rows.device_weights[:rows]
        ranks = self._pages.rank_rows(self._store.page_pools, self._device_lists, weights) if adapters else NO_RANKS
        return DecodeStep(self._rows.ids(rows), self._rows.places(rows), ranks)

    def _step(self, step: DecodeStep) -> None:
        """All that happens on the device."""
        rows = step.ids.shape[0]
        self._stamps.begin()
        self._stamps.mark("copy")
        self._rows.upload(rows)
        logits = self._forward(step)
        self._stamps.mark("sampling")
        greedy(logits, self._results[:rows], self._greedy)
        self._stamps.mark("end")
        self._host_results.copy_(self._results, non_blocking=True)


def _bucket(count: int) -> int:
    return next(rows for rows in BUCKETS if rows >= count)


def _is_greedy(request: Request) -> bool:
    """Whether its token is the largest of all logits of the base."""
    return request.sampling.temperature == 0 and request.sampling.repetition_penalty == 1

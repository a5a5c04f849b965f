"""Decode steps that run on the device from the upload of their rows to the tokens drawn: under a CUDA graph where there is one."""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..kernels.device_sampling import DeviceSampler
from ..kernels.packed import PackedWeight
from ..kernels.stamps import Stamps
from ..kernels.triton_compat import HAS_TRITON
from .adapter_share import AdapterShare
from .adapter_store import AdapterStore
from .blocks import blocks_for
from .device_graphs import DecodeGraphs, Kind, NoGraph
from .device_rows import StepRows
from .failures import sentence
from .models.decode_forward import NO_RANKS, DecodeForward, DecodeStep
from .models.decoder import Decoder
from .page_lists import LIST_WORDS
from .page_table import PageTable
from .protocol import GRAPH_OPS, Emit
from .request import Request
from .routing import Routing
from .row_profiles import RowProfiles

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


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When the parts of a step that has ended ran; `by_op` may be asked for later."""

    ms: float
    stamps: np.ndarray
    without_adapters: np.ndarray | None
    """[ops] ms of the same step without its adapters, where that was looked at"""
    adapters: bool


class DeviceStep:
    """Steps of one base in which every request computes one token and draws the next. `begin` launches one, `end` waits for it."""

    def __init__(self, decoder: Decoder, store: AdapterStore, caches: Tensor, max_running: int, emit: Emit) -> None:
        """The base must have no `device_obstacle`; `caches` as Decoder.kv_cache makes them; `emit` hears of graphs."""
        device, facts = decoder.device, decoder.facts
        most = _bucket(min(max_running, BUCKETS[-1]))
        pinned = device.type == "cuda"
        self._decoder, self._store, self._most = decoder, store, most
        self._rope_start = decoder.rope.start if decoder.rope.has_long else None
        self._rows = StepRows(most, blocks_for(decoder.context), facts.vocab, device)
        self._lists = torch.zeros(PageTable.linears(facts), LIST_WORDS, dtype=torch.int32, pin_memory=pinned)
        self._device_lists = torch.zeros_like(self._lists, device=device)
        self._pages = PageTable(facts, self._lists.numpy(), self._rows.weights, self._rows.late)
        self._results = torch.zeros(most + STAMPS_A_LAYER * (facts.layers + 1), dtype=torch.int64, device=device)
        """the tokens, then the stamps"""
        self._host_results = torch.zeros_like(self._results, device="cpu", pin_memory=pinned)
        self._stamps = Stamps(self._results[most:])
        self._forward = DecodeForward(decoder, caches, most, self._stamps)
        self._sampler = DeviceSampler(self._rows.draws, self._rows.device_draws, self._forward.columns)
        self._graphs = DecodeGraphs(device, emit)
        self._done = torch.cuda.Event() if pinned else None
        self._share = AdapterShare(len(GRAPH_OPS))
        self._without: np.ndarray | None = None
        self._launched = 0
        """requests of the step that `begin` launched"""
        self._began = 0.0
        self._routing: Routing | None = None
        self._moves = -1
        """of slots, when the adapters of the step were looked at"""
        self._obstacle = ""
        self._kind = Kind(1, False)
        self._random = self._penalised = False
        """whether draws change with the position, and with what was said before"""
        self._steps: dict[Kind, DecodeStep] = {}
        self._profiles: RowProfiles | None = None
        """made for the first adapter that needs it"""

    @property
    def graphs(self) -> int:
        """How many are captured."""
        return len(self._graphs)

    def only_the_step(self) -> None:
        """The next step is not run without its adapters, too."""
        self._share.postpone()

    def warm_up(self) -> None:
        """Prepare steps of one row without adapters, by one without a request."""
        self._launch(Kind(1, False))

    def begin(self, requests: Sequence[Request]) -> str:
        """Launch the step of `requests`. Returns "", or why it cannot run so; then nothing was launched."""
        self._began = time.perf_counter()
        if len(requests) > self._most:
            return f"{len(requests)} requests, at most {self._most} run in a graph"
        if self._rows.fill(requests, self._rope_start) or self._moves != self._store.moves:
            self._moves = -1
            self._obstacle = self._compose(requests)
            self._moves = self._store.moves
        if self._obstacle:
            return self._obstacle
        if self._penalised:
            self._sampler.set([request.draw(self._decoder.device) for request in requests])
        elif self._random:
            self._sampler.move_on([len(request.ids) for request in requests])
        if self._kind.own:
            self._profiles.embeddings.set([request.ids[-1] for request in requests])
        self._rows.upload_tables()
        self._without = self._run_without_adapters(self._kind)
        self._launched = len(requests)
        return self._launch(self._kind)

    @property
    def routing(self) -> Routing | None:
        """The adapters of the step that was launched last."""
        return self._routing

    def end(self) -> tuple[list[int], StepTimes]:
        """A token for each request of the step that `begin` launched, -1 where logits are not finite; and its times."""
        self._wait()
        tokens = self._host_results[: self._launched].tolist()
        stamps = self._host_results[self._most :].numpy().copy()
        return tokens, StepTimes((time.perf_counter() - self._began) * 1e3, stamps, self._without, self._routing is not None)

    def by_op(self, times: StepTimes) -> dict[str, float]:
        """Milliseconds by GRAPH_OPS (see StepFinished): what the stamps of a step say, and what they leave of it. Asked once a step."""
        lasted, adapters = self._stamps.sums(times.stamps, GRAPH_OPS), 0.0
        if times.adapters:
            if times.without_adapters is not None:
                self._share.measured(times.without_adapters, lasted)
            lasted, adapters = self._share.split(lasted)
        by_op = dict(zip(GRAPH_OPS, lasted.tolist(), strict=True))
        by_op["adapters"] = adapters
        by_op["gaps"] = times.ms - sum(by_op.values())
        return by_op

    def _run_without_adapters(self, kind: Kind) -> np.ndarray | None:
        """Now and then: the step as it would be without adapters, for its times [ops] ms, which are not counted. What it leaves in the
        cache is written over by the step itself."""
        if not kind.adapters or not self._stamps.live or not self._share.due((kind, *self._routing.columns)):
            return None
        plain = replace(kind, adapters=False, own=False, gates="", late=False)
        if plain not in self._graphs:
            plain = kind
            self._device_lists.zero_()  # no adapter acts then
        self._launch(plain)
        self._wait()
        self._device_lists.copy_(self._lists, non_blocking=True)
        self._began = time.perf_counter()
        return self._stamps.sums(self._host_results[self._most :].numpy(), GRAPH_OPS)

    def _wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def _compose(self, requests: Sequence[Request]) -> str:
        """Make the adapters that act on the rows those of the step. Returns "", or why they cannot be."""
        acting = {use.name: use.digest for row in self._rows.uses for use in row}
        self._store.check_holds(acting)
        self._routing = self._store.routing(acting) if acting else None
        own, gates, late = False, "", [frozenset[str]()] * len(requests)
        if self._routing is not None:
            if why := self._routing.obstacle or self._compose_own(self._routing):
                return why
            if not self._routing.plain:
                own, gates, late = True, self._profiles.gates, self._profiles.late
            if self._pages.compose(self._routing):
                self._device_lists.copy_(self._lists, non_blocking=True)
            for row, (request, active, behind) in enumerate(zip(requests, self._rows.uses, late, strict=True)):
                self._pages.fill(row, active, len(request.ids) - 1, behind)
        self._kind = Kind(_bucket(len(requests)), self._routing is not None, own, gates, any(late))
        self._random = any(request.sampling.temperature > 0 for request in requests)
        self._penalised = any(request.sampling.repetition_penalty != 1 for request in requests)
        self._sampler.set([request.draw(self._decoder.device) for request in requests])
        return ""

    def _compose_own(self, routing: Routing) -> str:
        """What they change of single rows besides rank rows. Returns "", or why no graph can have it."""
        if routing.plain:
            return ""
        try:
            self._profiles = self._profiles or RowProfiles(self._decoder, self._rows, self._forward.base_rows)
        except torch.OutOfMemoryError as error:
            return sentence(error)
        return self._profiles.compose(routing.contents, self._rows.uses)

    def _launch(self, kind: Kind) -> str:
        if kind not in self._steps:
            self._steps[kind] = self._inputs(kind)
        try:
            self._graphs.run(kind, lambda: self._step(kind))
        except NoGraph as failed:
            return str(failed)
        if self._done is not None:
            self._done.record()
        return ""

    def _inputs(self, kind: Kind) -> DecodeStep:
        weights = self._rows.device_weights[: kind.rows]
        ranks = self._pages.rank_rows(self._store.page_pools, self._device_lists, weights) if kind.adapters else NO_RANKS
        own = None
        if kind.own:
            late = self._rows.device_late[: kind.rows]
            behind = self._pages.rank_rows(self._store.page_pools, self._device_lists, late) if kind.late else NO_RANKS
            own = self._profiles.rows(kind.rows, kind.gates, behind)
        return DecodeStep(self._rows.ids(kind.rows), self._rows.places(kind.rows), ranks, own)

    def _step(self, kind: Kind) -> None:
        """All that happens on the device."""
        self._stamps.begin()
        self._stamps.mark("copy")
        self._rows.upload(kind.rows, kind.own)
        logits = self._forward(self._steps[kind])
        self._stamps.mark("sampling")
        self._sampler.run(logits, self._results[: kind.rows])
        self._stamps.mark("end")
        self._host_results.copy_(self._results, non_blocking=True)


def _bucket(count: int) -> int:
    return next(rows for rows in BUCKETS if rows >= count)


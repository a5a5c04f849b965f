"""Linears under adapters as other engines compute them, for the measurement of ops: torch's product, and their LoRA ops on it."""
from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.triton_compat import tl, triton
from .peer_files import PeerError, PeerFiles, PeerImports, installed, unpacked

MOST_ERROR = 0.02
"""of what a peer adds, relative to the same in float64"""
SCALE = 0.7
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class PeerCell:
    """A linear [ends[-1], d_in] whose rows have adapters of `ranks`: `of_row` [rows], ascending, which each has."""

    d_in: int
    ends: tuple[int, ...]
    ranks: Sequence[int]
    of_row: Sequence[int]
    prompt: bool
    """its rows are those of prompts, one an adapter; else each is a reply's"""
    weights: Sequence[Tensor]
    """copies of the base's"""
    x: Tensor
    """[rows, d_in]"""

    @property
    def slices(self) -> list[tuple[int, int]]:
        return list(pairwise((0, *self.ends)))

    @property
    def rank(self) -> int:
        """What ranks are padded to."""
        return max(self.ranks)

    def pairs(self) -> Iterator[Pair]:
        """Random (A [adapters, slices, rank, d_in], B [adapters, ends[-1], rank]) for each copy, zero beyond an adapter's own rank."""
        for _ in self.weights:
            a = self._random(len(self.slices), self.rank, self.d_in, size=self.d_in ** -0.5)
            b = self._random(self.ends[-1], self.rank, size=0.02)
            for adapter, rank in enumerate(self.ranks):
                a[adapter, :, rank:] = 0
                b[adapter, :, rank:] = 0
            yield a, b

    def _random(self, *shape: int, size: float) -> Tensor:
        return torch.empty(len(self.ranks), *shape, dtype=self.x.dtype, device=self.x.device).normal_(0.0, size)

    def reference(self, a: Tensor, b: Tensor) -> Tensor:
        """[rows, ends[-1]] float64: what the adapters add."""
        out = torch.zeros(len(self.of_row), self.ends[-1], dtype=torch.float64, device=self.x.device)
        for row, adapter in enumerate(self.of_row):
            for index, (start, end) in enumerate(self.slices):
                out[row, start:end] = SCALE * (b[adapter, start:end].double() @ (a[adapter, index].double() @ self.x[row].double()))
        return out


class Peer(Protocol):
    """Another engine whose files were imported."""

    def prepared(self, cell: PeerCell, pairs: Sequence[Pair]) -> Callable[[int], Tensor]:
        """What computes a copy [rows, ends[-1]] with its pair, after all that a step does once."""


def peer_run(peer: Peer, cell: PeerCell) -> Callable[[], object]:
    """What takes each copy once. Raises PeerError when its numbers are wrong or it does not run."""
    try:
        pairs = list(cell.pairs())
        run = peer.prepared(cell, pairs)
        added = run(0).double() - F.linear(cell.x, cell.weights[0]).double()
    except Exception as error:
        raise PeerError(f"{type(error).__name__}: {error}") from error
    expected = cell.reference(*pairs[0])
    rounding = torch.finfo(cell.x.dtype).eps * F.linear(cell.x, cell.weights[0]).double().norm()
    if not (added - expected).norm() <= MOST_ERROR * expected.norm() + rounding:
        raise PeerError("it computed other numbers than these adapters give")
    return lambda: [run(copy) for copy in range(len(cell.weights))]


class Vllm:
    """Its Triton ops, as its LoRA layers call them."""

    def __init__(self, files: PeerFiles) -> None:
        ops, imports = "vllm.lora.ops.triton_ops", PeerImports(files, _vllm_stand_ins())
        self._shrink = imports.take(f"{ops}.lora_shrink_op", "lora_shrink")
        self._expand = imports.take(f"{ops}.lora_expand_op", "lora_expand")
        self._meta = imports.take(f"{ops}.lora_kernel_metadata", "LoRAKernelMeta")
        self._known = [imports.take(f"{ops}.utils", name) for name in ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT")]

    def prepared(self, cell: PeerCell, pairs: Sequence[Pair]) -> Callable[[int], Tensor]:
        for known in self._known:  # by address, where other matrices may lie now
            known.clear()
        rows, device = cell.x.shape[0], cell.x.device
        meta = self._meta.make(len(cell.ranks), rows, device=device)
        meta.prepare_tensors(torch.tensor(cell.of_row, dtype=torch.int32, device=device))
        step = meta.meta_args(rows, False)
        shrinks = [[a[:, index].unsqueeze(1).contiguous() for index in range(len(cell.slices))] for a, _ in pairs]
        expands = [[(b[:, start:end] * SCALE).unsqueeze(1).contiguous() for start, end in cell.slices] for _, b in pairs]

        def run(copy: int) -> Tensor:
            y = F.linear(cell.x, cell.weights[copy])
            shrunk = torch.empty(len(cell.slices), rows, cell.rank, dtype=torch.float32, device=device)
            self._shrink(cell.x, shrinks[copy], shrunk, *step, 1.0)
            self._expand(shrunk, expands[copy], y, *step, offset_start=0, add_inputs=True)
            return y

        return run


class Sglang:
    """Its triton_v2 backend, with the plans that it ships for the device."""

    def __init__(self, files: PeerFiles) -> None:
        imports = PeerImports(files, _sglang_stand_ins())
        self._runner = imports.take("sglang.srt.lora.dense.runner", "DenseLoraRunner")
        self._linear = imports.take("sglang.srt.lora.dense.plan", "DenseLoraKind").LINEAR
        self._workspace = imports.take("sglang.srt.lora.workspace", "LoraWorkspace")
        self._phase = imports.take("sglang.srt.lora.utils", "Phase")
        small = imports.take("sglang.kernels.ops.lora.common.routing", "_SMALL_ROUTE_MAX_PAIRS")
        sys.modules["sglang.kernels.ops.lora.common.routing"]._LARGE_ROUTE_MIN_PAIRS = small + 1  # between them it would compile CUDA code

    def prepared(self, cell: PeerCell, pairs: Sequence[Pair]) -> Callable[[int], Tensor]:
        rows, device, offsets = cell.x.shape[0], cell.x.device, (0, *cell.ends)
        runner = self._runner(self._workspace(), max_loras=len(cell.ranks), device=device)
        runner.begin_batch(
            token_slots=torch.tensor(cell.of_row, dtype=torch.int32, device=device),
            lora_ranks=torch.tensor(cell.ranks, dtype=torch.int32, device=device),
            scalings=torch.full((len(cell.ranks),), SCALE, device=device), num_tokens=rows,
            phase=self._phase.PREFILL if cell.prompt else self._phase.DECODE, graph_mode=device.type == "cuda")
        end_to_end = [self._end_to_end(cell, a) for a, _ in pairs]
        plan = runner.plan_for(self._linear, cell.rank, cell.d_in, cell.ends[-1], num_tokens=rows)

        def run(copy: int) -> Tensor:
            if copy == 0:  # once a step
                runner.reset_routes()
            return runner.apply(cell.x, lambda: F.linear(cell.x, cell.weights[copy]), plan, a=end_to_end[copy], b=pairs[copy][1],
                                offsets=offsets)

        return run

    def _end_to_end(self, cell: PeerCell, a: Tensor) -> Tensor:
        """[adapters, slices * rank, d_in]: an adapter's slices one behind the other at its own rank."""
        out = torch.zeros(len(cell.ranks), len(cell.slices) * cell.rank, cell.d_in, dtype=a.dtype, device=a.device)
        for adapter, rank in enumerate(cell.ranks):
            out[adapter, : len(cell.slices) * rank] = a[adapter, :, :rank].flatten(0, 1)
        return out


def obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why no peer can be measured so, "" where they can."""
    return "" if device.type == "cuda" and dtype.itemsize == 2 else "its ops take numbers of 16 bits on a CUDA device alone"


class Peers:
    """The other engines that are measured, and why those are not that were found."""

    def __init__(self, wheels: Sequence[str], into: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Those of `wheels`, unpacked below `into`, and those that are installed."""
        self._peers: dict[str, Peer] = {}
        self._told: dict[str, dict[str, str]] = {}
        for path in map(Path, wheels):
            try:
                self._import(unpacked(path, into), device, dtype)
            except PeerError as error:
                self._tell(path.name.partition("-")[0], "", str(error))
        for files in installed():
            if files.package not in self._told:
                self._import(files, device, dtype)

    def told(self) -> list[dict[str, str]]:
        """Of each that was found its name, its version, and the first reason why a figure of it is lacking, "" for none."""
        return list(self._told.values())

    def medians(self, name: str, cell: PeerCell, times: Callable[[Callable[[], object]], list[float]]) -> dict[str, float | None]:
        """By peer, of the `times` of the case `name`; None where there are none, which is told."""
        found: dict[str, float | None] = dict.fromkeys(self._told)
        for package, peer in self._peers.items():
            try:
                found[package] = round(statistics.median(times(peer_run(peer, cell))), 3)
            except Exception as error:  # of whatever kind: it is not our code
                self._told[package]["why"] = self._told[package]["why"] or f"{name}: {error}"
        return found

    def _import(self, files: PeerFiles, device: torch.device, dtype: torch.dtype) -> None:
        why = obstacle(device, dtype)
        if not why:
            try:
                self._peers[files.package] = PEERS[files.package](files)
            except PeerError as error:
                why = str(error)
        self._tell(files.package, files.version, why)

    def _tell(self, package: str, version: str, why: str) -> None:
        self._told[package] = {"peer": package, "version": version, "why": why}


PEERS: dict[str, Callable[[PeerFiles], Peer]] = {"vllm": Vllm, "sglang": Sglang}


def _vllm_stand_ins() -> dict[str, dict[str, Any]]:
    def kept_as_it_is(**_: object) -> None:
        raise AttributeError("the op is called without torch's dispatcher")

    def on_device(data: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(data, dtype=dtype).to(device)

    return {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_LORA_ENABLE_DUAL_STREAM": False, "VLLM_LORA_DISABLE_PDL": False,
                      "VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.logger": {"init_logger": _Logger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.utils.torch_utils": {"direct_register_custom_op": kept_as_it_is, "async_tensor_h2d": on_device}}


class _Logger(logging.Logger):
    def warning_once(self, *_: object) -> None:
        """Said by the engine that it belongs to, of its own settings."""

    info_once = warning_once


class _Platform:
    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def is_device_capability(self, number: int) -> bool:
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor == number

    def has_device_capability(self, number: int) -> bool:
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor >= number


def _sglang_stand_ins() -> dict[str, dict[str, Any]]:
    return {"sglang.srt.environ": {"envs": _Unset()}, "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
            "sglang.kernels.ops.lora.moe.virtual_experts": {"_align_block_size_jit": None}}


class _Unset:
    """Settings of which none is made."""

    def __getattr__(self, name: str) -> _Unset:
        return self

    def get(self) -> None:
        return None

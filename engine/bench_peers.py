"""Linears under adapters as other engines compute them, for the measurement of ops: torch's product, and their LoRA ops on it."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .peer_cell import Pair, PeerCell
from .peer_files import PeerError, PeerFiles, installed, unpacked
from .peer_sglang import Sglang
from .peer_vllm import Vllm

MOST_ERROR = 0.02
"""of what a peer adds, relative to the same in float64"""


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

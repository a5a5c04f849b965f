"""The snapshot: what is, whole, at most 10 a second."""
from __future__ import annotations

from typing import Literal

from .facts import AdapterInfo, ModelInfo
from .kv import KvView
from .words import Mix, Struct


class SlotView(Struct):
    slot: int
    adapter: str = ""
    """"" when free"""
    rank: int = 0
    bytes: int = 0
    pinned: bool = False
    users: int = 0
    """running requests that use it"""
    idle_s: float = 0.0
    """seconds since last use"""
    pages: int = 0
    """of rank rows that it has, of all kinds of linear"""


class PagesView(Struct):
    """The pages of one kind of fused linear, each with 16 rank rows for all layers."""

    kind: str
    used: int
    total: int
    bytes: int
    """of one page"""


class AdapterView(Struct):
    info: AdapterInfo
    tier: Literal["slot", "host", "disk"]
    slot: int = -1
    pinned: bool = False
    file: Literal["", "changed", "deleted"] = ""
    """what became of its file since it was read"""
    reading: bool = False
    """it is being read from disk again, for who waits for it"""


class HostView(Struct):
    used_bytes: int = 0
    limit_bytes: int = 0
    adapters: tuple[str, ...] = ()
    """least recently used first"""


class EngineSnapshot(Struct):
    model: ModelInfo | None = None
    adapters: tuple[AdapterView, ...] = ()
    slots: tuple[SlotView, ...] = ()
    pages: tuple[PagesView, ...] = ()
    """device memory for rank rows, by kind of fused linear; none where adapters are held whole"""
    host: HostView = HostView()
    kv: KvView = KvView()
    mix: Mix = ()
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    memory_bytes: int = 0
    """resident set of the engine process"""
    composed_bytes: int = 0
    """device memory of adapters laid end to end for steps that use several at once (at most two such compositions), beside the slots"""

"""What runs while a piece of work is done: kernels and copies on a CUDA device, torch's ops on a CPU."""
from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.profiler import DeviceType, profile


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel or op. Times in nanoseconds, by one clock."""

    name: str
    lane: int
    """stream or thread"""
    begin: int
    end: int


@dataclass(slots=True)
class NameTimes:
    """All that ran under one name. Nanoseconds."""

    name: str
    calls: int = 0
    own: int = 0
    """an op without the ops that it called"""
    beside: int = 0
    """of these, while something ran on another lane"""


@dataclass(frozen=True, slots=True)
class Times:
    by_name: list[NameTimes] = field(default_factory=list)
    """the longest first"""
    busy: int = 0
    """nanoseconds in which anything ran"""


class Recorder:
    """Records between `start` and `stop`, once; on a CPU what this thread does. Both raise RuntimeError when torch's profiler cannot."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
        on_device = device.type == "cuda"
        if on_device:
            os.environ["TEARDOWN_CUPTI"] = "0"  # graphs that were captured before would not outlive it
        self._profile = profile(use_kineto=True, use_cpu=not on_device, use_device="cuda" if on_device else None)

    def start(self) -> None:
        self._profile.__enter__()

    def stop(self) -> list[Ran]:
        """What ran, after all of it has ended."""
        self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        events = results.events() if results is not None else ()
        return [Ran(event.name(), event.device_resource_id(), event.start_ns(), event.end_ns()) for event in events
                if event.device_type() == self._device_type and not event.is_user_annotation()]


def times(ran: Sequence[Ran]) -> Times:
    """What each name took, by the moments at which it ran itself."""
    found: dict[str, NameTimes] = {}
    for one in ran:
        found.setdefault(one.name, NameTimes(one.name)).calls += 1
    edges = sorted(((at, starts, name) for name, begin, end in _alone(ran) for at, starts in ((begin, 1), (end, -1))),
                   key=lambda edge: edge[:2])
    now: dict[str, int] = defaultdict(int)
    running = busy = before = 0
    for at, starts, name in edges:
        if running and at > before:
            busy += at - before
            for other, count in now.items():
                found[other].own += count * (at - before)
                found[other].beside += count * (at - before) if running > 1 else 0
        before, running = at, running + starts
        now[name] += starts
        if not now[name]:
            del now[name]
    return Times(sorted(found.values(), key=lambda one: (-one.own, one.name)), busy)


def _alone(ran: Sequence[Ran]) -> list[tuple[str, int, int]]:
    """(name, begin, end) of the stretches in which each ran and nothing that it called. On one lane a later one lies within an earlier
    one, or behind it; a kernel whose programs came before those of the last one had ended (early.py) is counted from that end on."""
    stretches: list[tuple[str, int, int]] = []
    lanes: dict[int, list[Ran]] = defaultdict(list)
    for one in sorted(ran, key=lambda one: (one.begin, -one.end)):
        lanes[one.lane].append(one)
    for lane in lanes.values():
        stretches += _of_lane(lane)
    return stretches


def _of_lane(lane: Sequence[Ran]) -> list[tuple[str, int, int]]:
    stretches: list[tuple[str, int, int]] = []
    open_ones: list[Ran] = []
    at = 0
    for one in lane:
        begin = one.begin
        while open_ones and (open_ones[-1].end <= begin or open_ones[-1].end < one.end):
            begin = max(begin, open_ones[-1].end)
            at = _close(open_ones, at, stretches)
        if open_ones:
            stretches.append((open_ones[-1].name, at, begin))
        open_ones.append(one)
        at = begin
    while open_ones:
        at = _close(open_ones, at, stretches)
    return [stretch for stretch in stretches if stretch[2] > stretch[1]]


def _close(open_ones: list[Ran], at: int, stretches: list[tuple[str, int, int]]) -> int:
    """The innermost one ends. Returns the moment from which the one around it runs by itself."""
    last = open_ones.pop()
    stretches.append((last.name, at, last.end))
    return max(at, last.end)

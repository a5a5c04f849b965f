"""Copies into pages, beside the steps of a CUDA device: no step waits for one but the first that reads what it brings, on the device."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class PageLoad:
    """Copies on their way. `done` is None where they were over at once, or are known to be over."""

    done: torch.cuda.Event | None = None


class PageLoads:
    """The thread that calls it runs the steps, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> PageLoad:
        """Copy each of `sources`, in RAM, into its target once the steps that were launched before have ended.

        All are contiguous. Of pinned memory nothing waits here; it may be forgotten at once.
        """
        if not sources:
            return PageLoad()
        if self._stream is None:
            torch._foreach_copy_(targets, sources)
            return PageLoad()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        return PageLoad(self._stream.record_event())

    def wait(self, load: PageLoad) -> None:
        """What is launched on the current stream from now on finds the copies there."""
        if not self.over(load):
            torch.cuda.current_stream(self._device).wait_event(load.done)

    def over(self, load: PageLoad) -> bool:
        if load.done is not None and load.done.query():
            load.done = None
        return load.done is None

"""One CUDA graph: captured, or everything as it was before."""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

Pool = tuple[int, int]
"""torch.cuda.graph_pool_handle()"""


def captured(device: torch.device, pool: Pool, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`step` as a graph whose memory is of `pool`; it is called once before, to compile its kernels.

    What `step` or the capture raise is raised; then torch is as it was, so that other work can follow, and captures into other pools.
    """
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        step()
    torch.cuda.current_stream(device).wait_stream(beside)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # torch.cuda.graph leaves its stream the current one when it fails
        with torch.cuda.stream(beside), nothing_freed():
            _capture(graph, pool, beside, step)
    except Exception as error:
        _FAILED.append(graph)
        _mend(graph, pool, beside)
        raise error.__context__ or error from None  # what came first says why
    return graph


def _capture(graph: torch.cuda.CUDAGraph, pool: Pool | None, stream: torch.cuda.Stream, step: Callable[[], None]) -> None:
    # threads that bring adapters nearer allocate meanwhile
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        step()


_FAILED: list[torch.cuda.CUDAGraph] = []
"""torch's allocator of pinned memory asks them, for ever, whether a stream is theirs"""


def _mend(graph: torch.cuda.CUDAGraph, pool: Pool, stream: torch.cuda.Stream) -> None:
    """End in torch what CUDA ended already: its allocator and its generator of random numbers act as in a capture until one succeeds."""
    graph.reset()
    with suppress(RuntimeError):  # it may have come so far
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    number = torch.zeros(1, device=stream.device)
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        _capture(torch.cuda.CUDAGraph(), None, stream, number.zero_)


@contextmanager
def nothing_freed() -> Iterator[None]:
    """What Python would collect now (graphs of a base that was unloaded, say) the device frees by calls that end a capture."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

"""How long each op of the engine takes at a shape, beside the bytes that it must read and what torch has for it.

`python -m lora_bench.engine.bench_kernels '{"shape": "135m", ...}'`, with the arguments of `run_kernels`, prints JSON lines: {"progress":
text} now and then, the result last.
"""
from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_step import SHAPE, exit_code
from .program import answer, set_spins

if TYPE_CHECKING:
    import torch

    from .bench_ops import Case
    from .bench_peers import Peers

TIMES = 11
SECONDS = 1.0
"""after which nothing is timed once more, but it is three times"""


def run_kernels(
    shape: str | None = None, device: str = "auto", dtype: str = "auto", rows: int = 8, context: int = 256, tokens: int = 2048,
    ranks: Sequence[int] = (16,) * 8, peer_wheels: Sequence[str] = (), progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Median microseconds of every op of bench_ops at the sizes of `shape` (see random_base; None: that of bench_step), on random numbers:
    replies of `rows` rows that hold `context` tokens, a prompt of `tokens`, adapters of `ranks`, the rows parted among them. Beside linears
    under adapters those of other engines that are installed, or in `peer_wheels` (see bench_peers).

    Without Triton each is its reference; the engine takes other ones for replies then. On a CUDA device each runs in a CUDA graph over
    copies that no cache holds. Raises WrongShape, ValueError, OutOfMemory.
    """
    import torch

    from ..kernels.triton_compat import runs_triton
    from .bench_machine import copy_bandwidth, machine
    from .bench_ops import OPS, Setting
    from .bench_peers import Peers
    from .config import AUTO_DTYPE, DTYPES, pick_device
    from .machine import use_cores
    from .random_base import shape_facts
    use_cores()
    on = pick_device(device)
    if dtype == "packed":
        raise ValueError("dtype packed: ops are measured on plain numbers; choose auto, fp32, bf16 or fp16")
    kind = AUTO_DTYPE[on.type] if dtype == "auto" else dtype
    name = shape or SHAPE[on.type]
    at = Setting(shape_facts(name), on, DTYPES[kind], rows, context, tokens, tuple(ranks))
    progress("measuring how fast memory is copied")
    bandwidth = copy_bandwidth(on)
    ops = []
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        peers = Peers(peer_wheels, Path(folder), on, at.dtype)
        for op in OPS:
            for case in op(at):
                progress(case.name)
                ops.append(_measured(case, peers, on, bandwidth))
    return {"measures": "kernels", "machine": machine(on), "shape": name, "dtype": kind, "triton": runs_triton(at.random(1)),
            "flags": {"shape": shape, "device": device, "dtype": dtype, "rows": rows, "context": context, "tokens": tokens,
                      "ranks": list(ranks), "peer_wheels": list(peer_wheels)},
            "copy_bytes_per_second": round(bandwidth), "peers": peers.told(), "ops": ops}


def _measured(case: Case, peers: Peers, on: torch.device, bandwidth: float) -> dict[str, Any]:
    def times(run: Callable[[], object]) -> list[float]:
        return [us / case.copies for us in _times(run, on)]

    ours, plain = times(case.run), times(case.plain) if case.plain is not None else []
    us, floor = statistics.median(ours), case.nbytes / bandwidth * 1e6
    theirs = peers.medians(case.name, case.peer_cell, times) if case.peer_cell is not None else {}
    return {"op": case.name, "us": round(us, 3), "least_us": round(min(ours), 3), "greatest_us": round(max(ours), 3),
            "copies": case.copies, "bytes": case.nbytes, "floor_us": round(floor, 3), "of_floor": round(floor / us, 4),
            "torch_us": round(statistics.median(plain), 3) if plain else None,
            "torch_over": round(statistics.median(plain) / us, 4) if plain else None, "peers_us": theirs}


def _times(run: Callable[[], object], device: torch.device) -> list[float]:
    """Microseconds of `run`, some times, after one that does not count."""
    return _device_times(run) if device.type == "cuda" else _host_times(run)


def _host_times(run: Callable[[], object]) -> list[float]:
    run()
    found: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(found) < TIMES and (len(found) < 3 or time.perf_counter() < end):
        began = time.perf_counter()
        run()
        found.append((time.perf_counter() - began) * 1e6)
    return found


def _device_times(run: Callable[[], object]) -> list[float]:
    import torch

    from .device_capture import nothing_freed
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run()
    torch.cuda.synchronize()
    with nothing_freed(), torch.cuda.graph(graph, stream=beside):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(two) * 1e3 for one, two in zip(marks, marks[1:], strict=False)]


def main() -> int:
    """The program; returns its exit code (see program.answer)."""
    return answer(run_kernels, exit_code)


if __name__ == "__main__":
    set_spins()
    sys.exit(main())

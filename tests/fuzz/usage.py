"""What this process takes: memory in megabytes, processor time in seconds."""
from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil

_PROCESS = psutil.Process()
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


def rss_mb() -> float:
    return _PROCESS.memory_info().rss / 1e6


def forget_peak() -> None:
    """`peak_mb` counts from now on; where there is no /proc it counts from the start of the process."""
    if _RESET.exists():
        _RESET.write_text("5")


def peak_mb() -> float:
    """The most it held. On Linux not from getrusage: what it says begins with the peak of the process that started this one."""
    if _STATUS.exists():
        return int(next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT / 1e6


def processor_seconds() -> float:
    """Its own and that of children it has waited for. Other processes do not count, however busy the machine."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def limit_address_space(more: int) -> None:
    """So many bytes more than now may be asked for: a guard for the machine."""
    if sys.platform == "linux":
        now = _PROCESS.memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

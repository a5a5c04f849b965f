"""Cores and devices of this machine, as the engine may use them."""
from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch


def use_cores() -> None:
    """Compute with as many threads as there are cores for this process."""
    torch.set_num_threads(usable_cores())


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Physical cores that this process may really use: affinity, cgroup quota and hyper-threads taken off."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, _quota(cgroup) or allowed))


def device_names() -> tuple[str, ...]:
    """"cpu", and every CUDA device with its name."""
    cuda = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ("cpu", *cuda)


def _quota(cgroup: Path) -> int:
    """Whole cores of a cgroup v2 quota, at least 1; 0 when there is none."""
    try:
        quota, period = cgroup.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return 0

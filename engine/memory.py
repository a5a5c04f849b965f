"""Memory of this machine as this process may use it: in a container the container's limit counts. No torch."""
from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
_LIMIT_FILES = {"memory.max": ("memory.current", "memory.stat", "inactive_file"),
                "memory/memory.limit_in_bytes": ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file")}
"""file of a container's limit, as cgroups of version 2 and 1 have it -> where what is used stands, and what of it can be dropped"""


def total_memory(cgroups: Path = CGROUPS) -> int:
    """Bytes of the machine, or of the container where that is less."""
    return min(psutil.virtual_memory().total, container_limit(cgroups) or 1 << 62)


def container_limit(cgroups: Path = CGROUPS) -> int | None:
    """Bytes that the container of this process may hold; None without a limit."""
    return next((limit for file in _LIMIT_FILES if (limit := _number(cgroups / file)) is not None), None)


def free_memory(cgroups: Path = CGROUPS) -> int:
    """Bytes that may still be taken without swapping; files that the system keeps in memory unasked count as free."""
    free = psutil.virtual_memory().available
    for file, (used_file, facts_file, droppable) in _LIMIT_FILES.items():
        limit, used = _number(cgroups / file), _number(cgroups / used_file)
        if limit is not None and used is not None:
            free = min(free, limit - used + _fact(cgroups / facts_file, droppable))
    return max(0, free)


def _number(path: Path) -> int | None:
    """The number in a file; None when there is no such file, or the word "max" in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fact(path: Path, name: str) -> int:
    """The number of a line `name number`; 0 when there is none."""
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name + " ")), 0)
    except (OSError, ValueError):
        return 0

"""Functions that a Team runs, compiled by numba once for what this folder says and kept on disk.

numba looks only at the file of a function to know whether what it kept is still true, not at what that file imports. So the place has
the hash of all files here in its name.
"""
from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numba
import platformdirs
from numba import cfunc, njit, types

PREFIX = "compiled-"


def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _place() -> Path | None:
    """Beside these files, else in the user's cache; what older versions of them left there goes. None where neither can be written."""
    for parent in (Path(__file__).parent / "__pycache__", platformdirs.user_cache_path("lora-bench")):
        place = parent / f"{PREFIX}{_sources()}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            for other in parent.glob(f"{PREFIX}*"):
                if other != place:
                    shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue
        if os.access(place, os.W_OK):
            return place
    return None


PLACE = _place()
if PLACE is not None:
    numba.config.CACHE_DIR = str(PLACE)
LEAN = {"error_model": "numpy", "_nrt": False}
"""without Python's errors and without counting who uses an array: half as much to compile. They make no array"""
inner = njit(**LEAN)
"""Decorator: for a function that others call."""
summing = njit(**LEAN, fastmath={"contract", "reassoc", "nsz"})
"""Decorator: `inner`, whose sums are made in an order that suits vectors, the same for the same sizes. NaN and infinity remain."""
compiled = njit(**LEAN, nogil=True, cache=PLACE is not None)
"""Decorator: for a function whose first arguments are thread, threads, sync (see Team.run)."""
called = cfunc(types.void(*[types.int64] * 8), **LEAN, cache=PLACE is not None)
"""Decorator: for a function of eight int64 that others call by its address."""


def is_kept(name: str) -> bool:
    """Whether an earlier process has compiled the function of this name: else its first call takes seconds."""
    return PLACE is not None and any(PLACE.rglob(f"*.{name}-*.nbc"))

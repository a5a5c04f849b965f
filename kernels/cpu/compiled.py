"""Functions that a Team runs, compiled by numba once for what this folder says and kept on disk.

numba looks only at the file of a function to know whether what it kept is still true, not at what that file imports. So the place has
the hash of all files here in its name. Where it cannot be written or read, functions are compiled anew in each process.
"""
from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import platformdirs
from numba import cfunc, njit, types
from numba.core.caching import NullCache

PREFIX = "compiled-"
BESIDE = Path(__file__).parent / "__pycache__"


def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _place() -> Path | None:
    """Beside these files, where what older versions of them left goes; else in the user's cache. None where neither can be written."""
    for parent in (BESIDE, platformdirs.user_cache_path("lora-bench")):
        place = parent / f"{PREFIX}{_sources()}"
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        for other in BESIDE.glob(f"{PREFIX}*"):
            if other.name != place.name:
                shutil.rmtree(other, ignore_errors=True)
        if os.access(place, os.W_OK):
            return place
    return None


PLACE = _place()
if PLACE is not None:
    numba.config.CACHE_DIR = str(PLACE)
numba.config.DISABLE_JIT = 0  # somebody's NUMBA_DISABLE_JIT: nothing here is Python
LEAN = {"error_model": "numpy", "_nrt": False}
"""without Python's errors and without counting who uses an array: half as much to compile. They make no array"""
NINE = types.void(*[types.int64] * 9)

inner = njit(**LEAN)
"""Decorator: for a function that others call."""
summing = njit(**LEAN, fastmath={"contract", "reassoc", "nsz"})
"""Decorator: `inner`, whose sums are made in an order that suits vectors, the same for the same sizes. NaN and infinity remain."""
compiled = njit(**LEAN, nogil=True, cache=PLACE is not None)
"""Decorator: for a function whose first arguments are thread, threads, sync (see Team.run), always of the same types."""


def called(function: Callable[..., None]) -> Any:
    """Decorator: for a function of nine int64 that others call by its `address`."""
    try:
        return cfunc(NINE, **LEAN, cache=PLACE is not None)(function)
    except Exception:  # whatever numba and pickle make of a file that is torn, and of a disk that is full
        _give_up()
        return cfunc(NINE, **LEAN)(function)


def make_ready(function: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a `compiled` function, or have what was kept of it, for these arguments."""
    kinds = tuple(numba.typeof(each) for each in arguments)
    try:
        function.compile(kinds)
    except Exception:  # as in `called`; what is wrong with the function itself is raised again
        _give_up()
        function._cache = NullCache()
        function.compile(kinds)


def is_kept(name: str) -> bool:
    """Whether an earlier process has compiled the function of this name: else its first call takes seconds."""
    return PLACE is not None and any(PLACE.rglob(f"*.{name}-*.nbc"))


def _give_up() -> None:
    """Nothing that was kept is trusted any more."""
    if PLACE is not None:
        shutil.rmtree(PLACE, ignore_errors=True)

"""What becomes of the files of loaded adapters: changed, deleted, back; and new checkpoints beside them. No torch."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Literal

from .adapters.file import checkpoint_step
from .adapters.mlx import WEIGHTS as MLX_WEIGHTS
from .adapters.peft import CONFIG, PICKLE, SAFETENSORS

Stamp = tuple[tuple[int, int, int] | None, ...]
"""(mtime in ns, bytes, inode) of each file; None for one that is not there or cannot be reached"""
FileState = Literal["", "changed", "deleted"]
LOOK_SECONDS = 2.0
MAX_ENTRIES = 10_000
"""of a folder that is searched for checkpoints"""


@dataclass(frozen=True, slots=True)
class Watched:
    """The files of one loaded adapter and what they were like just before they were read."""

    name: str
    paths: tuple[Path, ...]
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found: the state of every adapter's files, and (adapter, path) of every checkpoint that is new and complete."""

    states: tuple[tuple[Watched, FileState], ...]
    checkpoints: tuple[tuple[str, Path], ...]


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """Links are followed: one that points elsewhere counts as another file."""
    return tuple(_stat(path) for path in paths)


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def state_of(watched: Watched) -> FileState:
    now = stamp_of(watched.paths)
    if now == watched.stamp:
        return ""
    return "deleted" if None in now else "changed"


class FileWatch:
    """One look every LOOK_SECONDS, each in a thread of its own: a network drive may take its time, or never answer."""

    def __init__(self) -> None:
        self._families = _Families()
        self._thread: Thread | None = None
        self._found: Look | None = None
        self._due = 0.0

    def poll(self, watched: Callable[[], Sequence[Watched]]) -> Look | None:
        """What the last look found, once; never waits. Begins the next look at the files of `watched()` when it is time."""
        if self._thread is not None and self._thread.is_alive():
            return None
        found, self._found, self._thread = self._found, None, None
        if found is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + LOOK_SECONDS
            if files := tuple(watched()):
                self._thread = Thread(target=self._look, args=(files,), daemon=True)
                self._thread.start()
        return found

    def _look(self, files: tuple[Watched, ...]) -> None:
        self._found = look(files, self._families)


def look(files: Sequence[Watched], families: _Families) -> Look:
    """One look at every file; `families` remembers which checkpoints were there before."""
    return Look(tuple((watched, state_of(watched)) for watched in files), tuple(families.new(files)))


class _Families:
    """Checkpoints by folder. What is there when a family is first looked at is old; what comes later is told once it is complete."""

    def __init__(self) -> None:
        self._known: dict[Path, set[str]] = {}
        self._coming: dict[Path, Stamp] = {}

    def new(self, files: Sequence[Watched]) -> Iterable[tuple[str, Path]]:
        """(adapter, path) of checkpoints that appeared and whose files stayed as they are from one look to the next."""
        folders = {watched.paths[0].parent: watched.name for watched in files}
        parents = {folder.parent: name for folder, name in folders.items() if checkpoint_step(folder) is not None}
        for parent, name in parents.items():
            there = _checkpoints(parent)
            known = self._known.setdefault(parent, set(there))
            for checkpoint in sorted(set(there) - known):
                if self._complete(parent / checkpoint):
                    known.add(checkpoint)
                    yield name, parent / checkpoint

    def _complete(self, folder: Path) -> bool:
        now = stamp_of(folder / file for file in (CONFIG, SAFETENSORS, PICKLE, MLX_WEIGHTS))
        before, self._coming[folder] = self._coming.get(folder), now
        return now == before and now[0] is not None and any(now[1:])


def _checkpoints(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False)
                    if checkpoint_step(Path(entry.name)) is not None]
    except OSError:
        return []

"""Finds models on this machine by their names alone; whether one can run is the engine's to say."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_DEPTH = 3
MAX_FOLDERS = 2000
"""folders looked into in one place, so that a scan from a home folder ends"""
PLAIN_NAMES = ("model.gguf", "ggml-model.gguf")
"""file names that say nothing without their folder's"""


class Found(NamedTuple):
    path: Path
    name: str
    place: str
    bytes: int


def places() -> list[tuple[str, Path, int]]:
    """(what people call it, folder, depth to look) of every place worth looking in."""
    return [
        ("here", Path.cwd(), MAX_DEPTH - 1),
        ("./models", Path("models").absolute(), MAX_DEPTH),
        ("~/models", Path.home() / "models", MAX_DEPTH),
        ("HF cache", hub_cache(), MAX_DEPTH + 1),
    ]


def hub_cache() -> Path:
    """Where Hugging Face's tools keep what they downloaded."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(os.path.expanduser(cache))
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.path.expanduser(home)) / "hub"


def find_models(where: list[tuple[str, Path, int]]) -> Iterator[Found]:
    """Every GGUF file and every folder with config.json and safetensors weights, each once, as it is found."""
    seen: set[Path] = set()
    for place, root, depth in where:
        for found in _look(place, root, depth, [MAX_FOLDERS]):
            if (real := found.path.resolve()) not in seen:
                seen.add(real)
                yield found


def _look(place: str, folder: Path, depth: int, left: list[int]) -> Iterator[Found]:
    """`left` counts down the folders still allowed. Links to folders are not followed, so nothing is walked twice."""
    left[0] -= 1
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in entries}
    weights = [entry for entry in entries if entry.name.endswith(".safetensors")]
    if "config.json" in names and weights:
        yield Found(folder, _folder_name(folder), place, sum(map(_size, weights)))
        return
    for entry in entries:
        if entry.name.endswith(".gguf") and _size(entry) > 0:
            name = f"{folder.name}/{entry.name}" if entry.name in PLAIN_NAMES else entry.name
            yield Found(Path(entry.path), name, place, _size(entry))
        elif depth > 0 and left[0] > 0 and not entry.name.startswith(".") and _is_folder(entry):
            yield from _look(place, Path(entry.path), depth - 1, left)


def _folder_name(folder: Path) -> str:
    """The repository's name for a snapshot in the Hugging Face cache, else the folder's own."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _size(entry: os.DirEntry[str]) -> int:
    """Bytes of a plain file (through links: the Hugging Face cache is made of them), 0 for all else."""
    try:
        return entry.stat().st_size if entry.is_file() else 0
    except OSError:
        return 0

"""An adapter on disk, as its headers describe it. No torch."""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..hub_cache import cache_name
from ..weights.entry import TensorEntry
from .config import LoraSettings
from .keys import TensorNames


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter on disk. `entries` is None for a `.bin`, whose tensors are known only once it is loaded."""

    path: Path
    """as the user named it"""
    config_path: Path
    """the file with the settings; the weights themselves where they hold them"""
    weights_path: Path
    format: str
    """"PEFT safetensors", "PEFT bin", "safetensors with metadata", "GGUF", "MLX" """
    settings: LoraSettings
    entries: Mapping[str, TensorEntry] | None
    names: TensorNames | None
    """what the tensors are; None as `entries` is"""
    weights_bytes: int
    notes: tuple[str, ...] = ()
    architecture: str = ""
    """of the base, where the file says it (GGUF: general.architecture)"""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """what the weights' file says of itself; untrusted, cut"""
    metadata_keys: int = 0
    """how many of it the file has: `metadata` holds the first"""
    card: Mapping[str, str] = field(default_factory=dict)
    """base_model, license, tags, ... of the folder's README.md; untrusted, cut"""
    task: str = ""
    prompt_prefix: str = ""
    """what the adapter expects before a prompt; offered to the person, never applied unasked"""
    tokenizer_json: Path | None = None
    """the folder's own tokenizer"""

    @property
    def default_name(self) -> str:
        """The name of its folder, of a checkpoint with that of the run before it; of a file that stands for itself, the file's."""
        if self.weights_path == self.config_path:
            return _readable(self.weights_path.stem) or "adapter"
        folder = self.config_path.absolute().parent
        if cached := cache_name(folder):
            return _readable(cached.rpartition("/")[2]) or "adapter"
        if checkpoint_step(folder) is not None and folder.parent.name:
            return _readable(f"{folder.parent.name}-{folder.name}")
        return _readable(folder.name) or "adapter"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors, as they are meant: those that the file holds transposed are turned. Of a `.bin` none."""
        if self.entries is None or self.names is None:
            return {}
        return {name: entry.shape[::-1] if name in self.names.turned else entry.shape for name, entry in self.entries.items()}

    @property
    def readable_path(self) -> str:
        """`path` as text that any encoder takes."""
        return _readable(self.path)


def checkpoint_step(folder: Path) -> int | None:
    """The step of a folder called checkpoint-STEP, as trainers call them; None for another."""
    step = folder.name.removeprefix("checkpoint-")
    return int(step) if step != folder.name and step.isascii() and step.isdigit() and len(step) < 18 else None


def _readable(path: str | os.PathLike[str]) -> str:
    """Bytes of a path that are no UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")

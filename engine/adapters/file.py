"""An adapter on disk, as its headers describe it. No torch."""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..weights.entry import TensorEntry
from .config import LoraSettings


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter on disk. `entries` is None for a `.bin`, whose tensors are known only once it is loaded."""

    path: Path
    """as the user named it"""
    config_path: Path
    weights_path: Path
    format: str
    """"PEFT safetensors" or "PEFT bin" """
    settings: LoraSettings
    entries: Mapping[str, TensorEntry] | None
    weights_bytes: int
    notes: tuple[str, ...]

    @property
    def default_name(self) -> str:
        """The name of its folder."""
        return _readable(self.config_path.absolute().parent.name) or "adapter"

    @property
    def readable_path(self) -> str:
        """`path` as text that any encoder takes."""
        return _readable(self.path)


def _readable(path: str | os.PathLike[str]) -> str:
    """Bytes of a path that are no UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")

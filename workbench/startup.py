"""The adapters that the workbench opens with."""
from __future__ import annotations

from pathlib import Path

from ..sample_adapters import sample_adapters
from .arguments import AdapterArgument
from .state import StartAdapter


def start_adapters(asked: tuple[AdapterArgument, ...], samples: bool) -> tuple[StartAdapter, ...]:
    """Those asked for, on; and, with the default model, our samples, listed and off."""
    on = tuple(StartAdapter(path, name, scale) for path, name, scale in asked)
    taken_paths = {Path(adapter.path).resolve() for adapter in on}
    taken_names = {adapter.name for adapter in on}
    shipped = sample_adapters() if samples else []
    return on + tuple(
        StartAdapter(str(path), name, on=False)
        for name, path in shipped
        if path.resolve() not in taken_paths and name not in taken_names
    )

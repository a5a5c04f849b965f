"""What the workbench opens with."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..sample_adapters import sample_adapters
from . import exit_codes, output
from .arguments import AdapterArgument
from .chats import find_told, none_text
from .state import StartAdapter


@dataclass(frozen=True)
class StartChat:
    """An earlier chat to go on with, and what it was held with."""

    file: Path
    path: str | None
    """of its base; None is the default model"""
    adapters: tuple[StartAdapter, ...]


def latest_chat() -> StartChat:
    """Raises Failed when there is none."""
    for saved in find_told(output.warn):
        bench = saved.chat.bench
        return StartChat(saved.file, bench.load.path if bench.load else None, bench.adapters)
    raise exit_codes.Failed(none_text(), exit_codes.USAGE)


def start_adapters(asked: tuple[AdapterArgument, ...], samples: bool, past: Iterable[StartAdapter] = ()) -> tuple[StartAdapter, ...]:
    """Those asked for, on; those of an earlier chat as they were; and, with the default model, our samples, listed and off."""
    on = tuple(StartAdapter(path, name, scale) for path, name, scale in asked)
    on += tuple(adapter for adapter in past if adapter.name not in {known.name for known in on})
    taken_paths = {Path(adapter.path).resolve() for adapter in on}
    taken_names = {adapter.name for adapter in on}
    shipped = sample_adapters() if samples else []
    return on + tuple(
        StartAdapter(str(path), name, on=False)
        for name, path in shipped
        if path.resolve() not in taken_paths and name not in taken_names
    )

"""The checkpoints of one training run: a folder of checkpoint-STEP folders. No torch."""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .file import checkpoint_step
from .peft import CONFIG

MAX_MEMBERS = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """One checkpoint. `step` is None for the adapter in the run's folder itself, saved at its end."""

    path: Path
    step: int | None


def family(path: str | os.PathLike[str]) -> list[Member]:
    """The adapters of the run whose folder is `path` or holds it: checkpoints by step, then the one in the folder itself.

    Empty for a path that belongs to no run. Raises OSError.
    """
    given = Path(os.path.expanduser(path)).absolute()
    folder = given if given.is_dir() else given.parent
    run = folder.parent if checkpoint_step(folder) is not None else folder
    found = members(run)
    if found and os.path.lexists(run / CONFIG):
        found.append(Member(run, None))
    return found


def members(run: Path) -> list[Member]:
    """The checkpoints with an adapter in the folder `run`, by step; at most the last MAX_MEMBERS."""
    steps = {path: step for path in run.iterdir() if (step := checkpoint_step(path)) is not None and os.path.lexists(path / CONFIG)}
    return [Member(path, step) for path, step in sorted(steps.items(), key=lambda item: item[1])][-MAX_MEMBERS:]

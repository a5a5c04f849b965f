"""Reading an adapter from disk: no state of the engine is touched, so it may go on beside the steps, and be cancelled."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from .adapters.adapter import Adapter
from .adapters.errors import AdapterError
from .adapters.file import AdapterFile
from .adapters.load import load_adapter
from .adapters.open import open_adapter
from .memory import free_memory
from .models.facts import ModelFacts
from .protocol import AdapterInfo
from .vocabulary import Vocabulary
from .watch import Stamp, stamp_of
from .weights.load import LoadCancelled

if TYPE_CHECKING:
    from .tiers import Ready

Progress = Callable[[int, int], None]
"""bytes read, bytes in all"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where an adapter came from."""

    path: Path
    """absolute, as the user named it"""
    exact: Path
    """what that led to: of a run's folder the checkpoint that was its newest, of an entry of a cache the snapshot"""
    files: tuple[Path, ...]
    stamp: Stamp
    """of `files`, from before they were read"""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter in RAM."""

    adapter: Adapter
    source: Source
    ms: float
    vocabulary: Vocabulary | None = None
    """with what the adapter adds to the base's, if anything"""
    ready: Ready | None = None
    """made ready for the slot that its name has"""


def read_adapter(
    path: str | os.PathLike[str], name: str | None, facts: ModelFacts,
    progress: Progress = lambda done, total: None, cancelled: Callable[[], bool] = lambda: False,
) -> ReadAdapter:
    """Read and check the adapter at `path` for the base `facts`; `name` None takes its folder's.

    Raises AdapterError, FormatError or OSError with a sentence, LoadCancelled once `cancelled()` is true. Files that change
    under the reading are refused.
    """
    began = perf_counter()
    if name is not None and not name.strip():
        raise AdapterError(f"{os.fspath(path)}: an adapter cannot have an empty name; give one or leave it out")
    files = files_of(open_adapter(path))
    stamp = stamp_of(files)
    file = open_adapter(path)  # behind the stamp: what is read now is what the stamp vouches for
    _check_room(file)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(min(done, file.weights_bytes), file.weights_bytes)
        if cancelled():
            raise LoadCancelled(f"{os.fspath(path)}: loading was cancelled")

    adapter = load_adapter(file, facts, name or file.default_name, advance)
    if files_of(file) != files or stamp_of(files) != stamp:
        raise AdapterError(f"{os.fspath(path)}: changed while it was read; let what writes to it finish and load it again")
    source = Source(Path(os.path.expanduser(path)).absolute(), file.path.absolute(), files, stamp)
    return ReadAdapter(adapter, source, (perf_counter() - began) * 1e3)


def read_again(
    source: Source, info: AdapterInfo, facts: ModelFacts,
    progress: Progress = lambda done, total: None, cancelled: Callable[[], bool] = lambda: False,
) -> ReadAdapter:
    """What was read from `source` before as `info` and is no longer in memory, proved to be the same; any thread may.

    Raises AdapterError in words, LoadCancelled once `cancelled()` is true.
    """
    try:
        read = read_adapter(source.exact, info.name, facts, progress, cancelled)
    except (ValueError, OSError) as error:
        raise AdapterError(f"adapter {info.name!r} is no longer in memory and cannot be read again: {error}") from error
    if read.adapter.info.digest != info.digest:
        raise AdapterError(f"adapter {info.name!r} is no longer in memory and {source.exact} has changed since it was loaded; "
                           "reload it to take what it holds now")
    return read


def _check_room(file: AdapterFile) -> None:
    """Raises AdapterError when the tensors take more memory than is free; quantised ones and fp64 are kept as fp32."""
    entries = (file.entries or {}).values()
    needed = sum(entry.nbytes if entry.type in ("F32", "F16", "BF16") else 4 * entry.elements for entry in entries) or file.weights_bytes
    if needed > (free := free_memory()):
        raise AdapterError(f"{file.weights_path}: its tensors take {needed:,} bytes of memory and {free:,} are free; "
                           "close other programs, or unload what is not needed")


def files_of(file: AdapterFile) -> tuple[Path, ...]:
    """The files whose content the adapter is."""
    parts = [entry.file for entry in (file.entries or {}).values()]
    tokenizer = [file.tokenizer_json] if file.tokenizer_json else []
    return tuple(dict.fromkeys(path.absolute() for path in (file.config_path, file.weights_path, *parts, *tokenizer)))


def differences(old: AdapterInfo, new: AdapterInfo) -> tuple[str, ...]:
    """What is different between two contents of one name, a clause each.

    It is "the weights" when the facts are the same; nothing for one content.
    """
    if old.digest == new.digest:
        return ()
    facts = {
        "rank": lambda info: _numbers(info.ranks),
        "effective scale": lambda info: _numbers(info.effective_scales),
        "invocation": lambda info: repr(info.invocation) if info.invocation else "none",
        "modules": lambda info: f"{info.matched}/{info.total}",
        "DoRA": lambda info: "yes" if info.dora else "no",
        "tokens added": lambda info: str(info.added_rows),
        "whole tensors": lambda info: str(len(info.replaced)),
        "dtype": lambda info: info.dtype,
    }
    found = [f"{label} {fact(old)} → {fact(new)}" for label, fact in facts.items() if fact(old) != fact(new)]
    found += [f"{word} {kind}"
              for word, kinds in (("now also", new.targets.keys() - old.targets), ("no longer", old.targets.keys() - new.targets))
              for kind in sorted(kinds)]
    return tuple(found) or ("the weights",)


def _numbers(values: tuple[float, ...]) -> str:
    if not values:
        return "none"
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g}–{values[-1]:g}"

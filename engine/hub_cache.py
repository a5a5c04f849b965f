"""Entries of the Hugging Face cache: models--owner--name, with refs and snapshots whose files are links to blobs. No torch."""
from __future__ import annotations

import os
from pathlib import Path

from .weights.files import FormatError, read_bounded

ENTRY = "models--"
_MAX_REF_BYTES = 256


def is_cache_entry(folder: Path) -> bool:
    return folder.name.startswith(ENTRY) and (folder / "snapshots").is_dir()


def snapshot_of(entry: Path) -> Path:
    """The model in a cache entry: the snapshot that refs/main names if it is complete, else the newest that is; a snapshot of one GGUF file
    is that file. Raises FormatError when none is complete, or when several GGUF files leave the choice open; OSError."""
    for snapshot in snapshots(entry):
        if (found := _model(snapshot)) is not None:
            return found
    raise FormatError(f"{entry}: no snapshot in this cache entry has both config.json and weights, or a GGUF file; the download is "
                      "incomplete: fetch the model again")


def snapshots(entry: Path) -> list[Path]:
    """The snapshots of a cache entry, complete or not: that which refs/main names, then the newest first. Raises OSError."""
    names = sorted(name for name in os.listdir(entry / "snapshots") if (entry / "snapshots" / name).is_dir())
    newest_first = sorted(names, key=lambda name: (entry / "snapshots" / name).stat().st_mtime, reverse=True)
    main = _main(entry)
    return [entry / "snapshots" / name for name in sorted(newest_first, key=lambda name: name != main)]


def cache_name(folder: Path) -> str | None:
    """"owner/name" of a snapshot folder in the cache, else None."""
    entry = folder.parent.parent
    if folder.parent.name != "snapshots" or not entry.name.startswith(ENTRY):
        return None
    return entry.name.removeprefix(ENTRY).replace("--", "/")


def _main(entry: Path) -> str:
    """What refs/main says; it is compared with the names of snapshots and never followed as a path."""
    ref = entry / "refs" / "main"
    return read_bounded(ref, _MAX_REF_BYTES).decode("utf-8", "replace").strip() if ref.exists() else ""


def _model(snapshot: Path) -> Path | None:
    files = [path for path in sorted(snapshot.iterdir()) if path.exists()]
    if (snapshot / "config.json").exists() and any(path.suffix == ".safetensors" for path in files):
        return snapshot
    models = [path for path in files if path.suffix.lower() == ".gguf"]
    firsts = [path for path in models if "-of-" not in path.stem or "-00001-of-" in path.stem]
    if len(firsts) > 1:
        shown = ", ".join(path.name for path in firsts[:5])
        raise FormatError(f"{snapshot}: holds {len(firsts)} GGUF files ({shown}{', …' if len(firsts) > 5 else ''}); "
                          "give the path of one of them")
    return firsts[0] if firsts else None

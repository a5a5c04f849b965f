"""The settings file: which models were opened last and how. A person may edit it; comments are kept.

A damaged file never keeps the program from starting: it is put aside under another name, and that is said.
"""
from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError

from ..engine.protocol import LoadModel

MAX_BYTES = 1 << 20
MAX_RECENT = 12


class Recent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that was opened. `path` "" is the default model."""

    path: str
    name: str
    used: datetime


class Settings(msgspec.Struct, frozen=True):
    recent: tuple[Recent, ...] = ()
    """newest first"""


def read_settings(file: Path) -> tuple[Settings, str]:
    """The settings, and a sentence if the file was damaged and put aside ("" otherwise)."""
    try:
        return msgspec.convert(_document(file).unwrap(), Settings), ""
    except FileNotFoundError:
        return Settings(), ""
    except (TOMLKitError, msgspec.ValidationError, UnicodeDecodeError, ValueError, RecursionError) as error:
        return Settings(), _put_aside(file, error)
    except OSError as error:
        return Settings(), f"{file} cannot be read ({error.strerror or error}); the recent models are not known"


def remember(file: Path, load: LoadModel, name: str, now: datetime) -> str:
    """Put a model first in the recent list. Returns a sentence if that could not be kept, "" otherwise."""
    settings, note = read_settings(file)
    entry = Recent(os.path.abspath(load.path) if load.path else "", name, now.replace(microsecond=0))
    others = [recent for recent in settings.recent if recent.path != entry.path]
    try:
        document = _document(file) if file.exists() else tomlkit.document()
        document["recent"] = _tables([entry, *others][:MAX_RECENT])
        _replace(file, tomlkit.dumps(document))
    except OSError as error:
        return f"{file} cannot be written ({error.strerror or error}); the recent models are not kept"
    return note


def _document(file: Path) -> tomlkit.TOMLDocument:
    if file.exists() and not file.is_file():
        raise OSError("it is not a plain file")
    with file.open("rb") as handle:
        data = handle.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    return tomlkit.parse(data.decode())


def _tables(entries: list[Recent]) -> tomlkit.items.AoT:
    tables = tomlkit.aot()
    for entry in entries:
        table = tomlkit.table()
        table.update({"path": entry.path, "name": entry.name, "used": entry.used})
        tables.append(table)
    return tables


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _put_aside(file: Path, error: Exception) -> str:
    aside = file.with_name(f"{file.name}.damaged")
    try:
        os.replace(file, aside)
        where = f"it was kept as {aside.name} and a new one begun"
    except OSError as failure:
        where = f"and it cannot be moved away ({failure.strerror})"
    return f"{file} is damaged ({str(error).splitlines()[0]}); {where}"

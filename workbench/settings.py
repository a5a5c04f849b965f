"""The settings file: which models were opened last, and what a person set. A person may edit it; comments are kept.

A damaged file never keeps the program from starting: it is put aside under another name, and that is said.
"""
from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError

from ..engine.protocol import LoadModel, MixChange
from .whole_files import aside, replace_file

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
    keep_chats: bool = True
    """whether chats are put down on disk, to go on with them another time"""
    live_change: MixChange = "splice"
    """what a change of the mix does to a reply that is being written"""


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
    return _put(file, "recent", _tables([entry, *others][:MAX_RECENT]), "the recent models are not kept") or note


def keep_change(file: Path, change: MixChange) -> str:
    """Put down what a change of the mix does. Returns a sentence if that could not be kept, "" otherwise."""
    _, note = read_settings(file)
    return _put(file, "live_change", change, "what a change of the mix does is not kept for the next start") or note


def _put(file: Path, key: str, value: object, lost: str) -> str:
    """Set one key and leave all else as it is; a sentence if that cannot be."""
    try:
        document = _document(file) if file.exists() else tomlkit.document()
        document[key] = value
        replace_file(file, tomlkit.dumps(document).encode(errors="replace"))
    except OSError as error:
        return f"{file} cannot be written ({error.strerror or error}); {lost}"
    return ""


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


def _put_aside(file: Path, error: Exception) -> str:
    kept = aside(file)
    try:
        os.rename(file, kept)
        where = f"it was kept as {kept.name} and a new one begun"
    except OSError as failure:
        where = f"and it cannot be moved away ({failure.strerror})"
    return f"{file} is damaged ({str(error).splitlines()[0]}); {where}"

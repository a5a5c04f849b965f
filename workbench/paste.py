"""Paths as people paste and drop them: quoted, escaped, as file:// addresses, several at once."""
from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .text import clean_line

_MOST = 64
MOST_FOUND = 1000
"""adapters that one paste adds"""


def pasted_paths(text: str) -> tuple[list[Path], str]:
    """The paths in `text`, and a sentence for the person when one does not exist (then no path is returned)."""
    whole = _path(text.strip().strip("'\""))
    if whole and _exists(whole):
        return [whole], ""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    paths = [path for word in words if (path := _path(word))]
    if not paths:
        return [], "type or paste the path of an adapter folder or file"
    if len(paths) > _MOST:
        return [], f"{len(paths)} paths at once; at most {_MOST} are taken"
    missing = [path for path in paths if not _exists(path)]
    if missing:
        return [], f"{clean_line(str(missing[0]), 160)} does not exist"
    return paths, ""


def adapters_in(path: Path) -> list[Path]:
    """The adapter folders right below a folder that is none itself, as a training run leaves them, by number; else the path."""
    if not path.is_dir() or (path / "adapter_config.json").exists():
        return [path]
    return sorted((file.parent for file in path.glob("*/adapter_config.json")), key=_numbered) or [path]


def _numbered(path: Path) -> tuple[str, int, str]:
    """checkpoint-900 comes before checkpoint-1000."""
    number = re.search(r"\d{1,18}$", path.name)
    return (path.name[:number.start()], int(number[0]), path.name) if number else (path.name, -1, path.name)


def _path(word: str) -> Path | None:
    if word.startswith("file://"):
        word = unquote(urlsplit(word).path)
    if not word or "\0" in word:
        return None
    return Path(os.path.expanduser(word))  # as pathlib's, but a user that is not there is no error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False

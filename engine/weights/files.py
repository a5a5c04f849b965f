"""Opening files that nobody vouches for: regular files only, sizes bounded, text of theirs made harmless."""
from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 64 << 20


class FormatError(ValueError):
    """A file is not what it should be. The message is one sentence or two that name the file and what to do."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises FormatError for pipes, devices and folders without waiting on them; OSError as usual."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device, not a regular file"
        raise FormatError(f"{path}: is {kind}; give a regular file")
    return os.fdopen(descriptor, "rb")


def present(path: Path) -> bool:
    """Whether there is anything at `path`. Raises FormatError for a link to nothing: a file of a cache that was not fetched whole."""
    if path.is_symlink() and not path.exists():
        raise FormatError(f"{path}: links to a file that is not there; the download is incomplete, fetch it again")
    return path.exists()


def read_bounded(path: Path, limit: int) -> bytes:
    """The whole file, refused by size before it is read. Raises FormatError, OSError."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise FormatError(f"{path}: holds {size:,} bytes, more than the {limit:,} that such a file may have")
        return stream.read(limit)


def parse_json_object(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object out of `data`; `path` is for the message. Raises FormatError for anything else, nesting bombs included."""
    if data.startswith(b"version https://git-lfs"):
        raise FormatError(f"{path}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull` or download it again")
    try:
        value = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise FormatError(f"{path}: JSON nested too deeply to be read") from None
    except ValueError as error:
        raise FormatError(f"{path}: is not valid JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds a JSON {type(value).__name__} where an object is expected")
    return value


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises FormatError, OSError."""
    return parse_json_object(read_bounded(path, limit), path)


def show(value: object, limit: int = 80) -> str:
    """An untrusted value for a message: as Python writes it, control characters visible, cut at `limit` characters."""
    text = repr(value[:limit] if isinstance(value, str) else value)
    cut = text[:limit + 2] + ("…" if len(text) > limit + 2 or isinstance(value, str) and len(value) > limit else "")
    return cut if cut.isprintable() else ascii(cut)[1:-1]

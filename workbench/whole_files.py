"""Files that are never seen half written, and other names for what was damaged."""
from __future__ import annotations

import os
from itertools import count
from pathlib import Path


def replace_file(file: Path, data: bytes) -> None:
    """`file` holds `data`: a kill leaves all of it or what was there before. Its folder is made. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with partial.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def aside(file: Path) -> Path:
    """A free name beside `file`, to keep it under as it was: `NAME.damaged`, `NAME.damaged-2`, ..."""
    names = (file.with_name(f"{file.name}.damaged{f'-{number}' if number > 1 else ''}") for number in count(1))
    return next(name for name in names if not name.exists())

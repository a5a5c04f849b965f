"""Any adapter file, by what it is. Headers only, no torch."""
from __future__ import annotations

import os
from pathlib import Path

from .file import AdapterFile
from .peft import open_peft


def open_adapter(path: str | os.PathLike[str]) -> AdapterFile:
    """The adapter at `path`: a folder, or a file of one.

    Raises AdapterError, FormatError or OSError with a sentence that names the file.
    """
    return open_peft(Path(os.path.expanduser(path)))

"""What an adapter says of itself: the front matter of its model card, metadata of its files.

All of it is untrusted and cut to bounds. No torch.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..weights.files import FormatError, open_regular

MAX_CARD_BYTES = 64 << 10
MAX_KEYS = 64
MAX_VALUE = 300
"""characters"""
MAX_PREFIX = 20_000
"""characters of a prompt prefix"""
_KEY = re.compile(r"([A-Za-z_][\w-]{0,60}):(?:\s+(.*))?\Z")


def read_card(folder: Path) -> dict[str, str]:
    """The simple fields of the YAML front matter of `folder`/README.md, lists joined by commas; {} when there is none that can be read.

    Plain, quoted and listed values of the first level are read; what is nested deeper is left out.
    """
    try:
        with open_regular(folder / "README.md") as stream:
            text = stream.read(MAX_CARD_BYTES).decode("utf-8", "replace")
    except (FormatError, OSError):
        return {}
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((index for index, line in enumerate(lines[1:], 1) if line.strip() == "---"), 0)
    return _fields(lines[1:end])


def cut_metadata(metadata: Mapping[str, object]) -> dict[str, str]:
    """Keys and values as text, as many and as long as a person reads. Arrays are cut by their items."""
    result = {}
    for key, value in list(metadata.items())[:MAX_KEYS]:
        text = value if isinstance(value, str) else str(list(value[:32]) if hasattr(value, "__getitem__") else value)
        result[key[:100]] = text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + "…"
    return result


def _fields(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    key = ""
    for line in lines:
        match = _KEY.fullmatch(line.rstrip())
        if match:
            key, value = match[1], (match[2] or "").strip()
            listed = value[1:-1].split(",") if value.startswith("[") and value.endswith("]") else [value] if value else []
            found[key] = [_plain(item) for item in listed]
        elif key and (item := re.fullmatch(r"\s*-\s+(.+)", line)):
            if not _KEY.fullmatch(item[1]):
                found[key].append(_plain(item[1]))
        elif line and not line[0].isspace():
            key = ""
    return cut_metadata({name: ", ".join(items) for name, items in found.items() if any(items)})


def _plain(value: str) -> str:
    value = value.strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value

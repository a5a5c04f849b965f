"""The fields of one adapter's config with their values and what is made of them, for the screen. No torch."""
from __future__ import annotations

import os
from pathlib import Path

from ..protocol import FieldVerdict
from ..weights.files import read_json_object
from .config import MAX_CONFIG_BYTES
from .fields import verdicts
from .peft import CONFIG

MOST_FIELDS = 200
_ORDER = ("refused", "honoured", "irrelevant")


def field_verdicts(path: str | os.PathLike[str]) -> tuple[FieldVerdict, ...]:
    """Every field of the config in or beside `path`, the refused ones first; none where there is no config that can be read."""
    given = Path(os.path.expanduser(path))
    try:
        raw = read_json_object((given if given.is_dir() else given.parent) / CONFIG, MAX_CONFIG_BYTES)
    except (ValueError, OSError):
        return ()
    found = [FieldVerdict(*verdict) for verdict in verdicts(raw)[:MOST_FIELDS]]
    return tuple(sorted(found, key=lambda verdict: _ORDER.index(verdict.verdict)))

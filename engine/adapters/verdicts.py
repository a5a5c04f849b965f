"""The fields of one adapter's config with their values and what is made of them, for the screen. No torch."""
from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..protocol import FieldVerdict
from ..weights.files import parse_json_object, read_json_object
from ..weights.safetensors import read_header
from .config import MAX_CONFIG_BYTES
from .family import members
from .fields import verdicts
from .mlx import WEIGHTS as MLX_WEIGHTS
from .open import open_adapter
from .peft import CONFIG, SAFETENSORS
from .single import CONFIG_KEYS

MOST_FIELDS = 200
_ORDER = ("refused", "honoured", "irrelevant")


def field_verdicts(path: str | os.PathLike[str]) -> tuple[FieldVerdict, ...]:
    """Every field of the PEFT config in, beside or inside `path`, the refused ones first; none where no such config can be read."""
    try:
        config = _config(Path(os.path.expanduser(path)))
    except (ValueError, OSError):
        return ()
    found = [FieldVerdict(*verdict) for verdict in verdicts(config)[:MOST_FIELDS]]
    return tuple(sorted(found, key=lambda verdict: _ORDER.index(verdict.verdict)))


def _config(given: Path) -> Mapping[str, Any]:
    """Empty for a container that has none: GGUF, MLX."""
    source = _source(given)
    if source.name == CONFIG:
        mlx = os.path.lexists(source.parent / MLX_WEIGHTS) and not os.path.lexists(source.parent / SAFETENSORS)
        return {} if mlx else read_json_object(source, MAX_CONFIG_BYTES)
    metadata = read_header(source).metadata if source.suffix == ".safetensors" else {}
    text = next((metadata[key] for key in CONFIG_KEYS if metadata.get(key, "").lstrip().startswith("{")), "{}")
    return parse_json_object(text.encode(), source) if len(text) <= MAX_CONFIG_BYTES else {}


def _source(given: Path) -> Path:
    """The file with the settings of the adapter at `given`, also of one that cannot be opened."""
    try:
        return open_adapter(given).config_path
    except (ValueError, OSError):
        folder = given if given.is_dir() else given.parent
        found = [] if os.path.lexists(folder / CONFIG) or not given.is_dir() else members(folder)
        beside = (found[-1].path if found else folder) / CONFIG
        return beside if os.path.lexists(beside) and given.suffix != ".gguf" else given

"""What a command line's words mean: `[NAME=]PATH[:SCALE]` and sizes. Pure text, no imports of weight."""
from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from ..sample_adapters import sample_adapters

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class UsageError(ValueError):
    """The words of a command line cannot be meant so; the text says what is expected."""


class AdapterArgument(NamedTuple):
    path: str
    name: str | None
    """None: the engine takes a free name from the path"""
    scale: float


def parse_adapter(text: str) -> AdapterArgument:
    """`[NAME=]PATH[:SCALE]`: cut at the last ':' if a number follows, and at the first '=' if no '/' comes before it."""
    rest, scale = _split_scale(text)
    name, equals, path = rest.partition("=")
    if not equals or "/" in name or "\\" in name:
        name, path = "", rest
    elif not name.strip():
        raise UsageError(f"--lora {text}: there is no name before '='; write [NAME=]PATH[:SCALE]")
    if not path:
        raise UsageError(f"--lora {text}: there is no path; write [NAME=]PATH[:SCALE], for example pirate=./adapters/pirate:0.75")
    return AdapterArgument(path, name or None, scale)


def _split_scale(text: str) -> tuple[str, float]:
    head, colon, tail = text.rpartition(":")
    if not colon:
        return text, 1.0
    try:
        scale = float(tail)
    except ValueError:
        return text, 1.0
    if not math.isfinite(scale):
        raise UsageError(f"--lora {text}: the scale must be a finite number, not {tail}; 1 is as trained, 0 is off, negative is allowed")
    return head, scale


def find_adapter(argument: AdapterArgument) -> AdapterArgument:
    """The adapter on disk, or the sample adapter of that name. Raises UsageError when there is neither."""
    if Path(argument.path).expanduser().exists():
        return argument._replace(path=str(Path(argument.path).expanduser()))
    samples = dict(sample_adapters())
    if argument.path in samples:
        return AdapterArgument(str(samples[argument.path]), argument.name or argument.path, argument.scale)
    raise UsageError(f"--lora {argument.path}: no such file or folder, and no sample adapter of that name; the samples are {', '.join(samples)}")


def find_model(text: str) -> str:
    """A model's path that exists. Raises UsageError otherwise."""
    path = Path(text).expanduser()
    if not path.exists():
        raise UsageError(f"{text}: no such file or folder; give a local GGUF file or a Hugging Face folder with safetensors weights "
                         "(nothing is downloaded by name), or no model for the default one")
    return str(path)


def parse_size(text: str) -> int:
    """Bytes or a count from `4096`, `4k`, `512M`, `1.5GiB`; the letters stand for powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    value = float(match[1]) * 1024 ** _POWER[match[2].lower()] if match else math.inf
    if not value < 2**62:
        raise UsageError(f"{text!r} is not a size; write a number with k, M, G or T, for example 4k, 512M or 2G")
    return int(value)

"""What a command line's words mean: adapters, models, sizes, numbers, escapes. Pure text, no imports of weight."""
from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from ..sample_adapters import sample_adapters

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
MAX_SCALE = 1e6
MAX_SLOTS = 256
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
"""the engine's own limits, known here so that nothing is loaded for what it would refuse"""


class UsageError(ValueError):
    """The words of a command line cannot be meant so; the text says what is expected."""


class AdapterArgument(NamedTuple):
    path: str
    name: str | None
    """None: the engine takes a free name from the path"""
    scale: float


def parse_adapter(text: str, option: str = "--lora") -> AdapterArgument:
    """`[NAME=]PATH[:SCALE]`: cut at the last ':' if a number follows, and at the first '=' if no '/' comes before it."""
    rest, scale = _split_scale(text, option)
    name, equals, path = rest.partition("=")
    if not equals or "/" in name or "\\" in name:
        name, path = "", rest
    elif not name.strip():
        raise UsageError(f"{option} {text}: there is no name before '='; write [NAME=]PATH[:SCALE]")
    if not path:
        raise UsageError(f"{option} {text}: there is no path; write [NAME=]PATH[:SCALE], for example pirate=./adapters/pirate:0.75")
    return AdapterArgument(path, name or None, scale)


def _split_scale(text: str, option: str) -> tuple[str, float]:
    head, colon, tail = text.rpartition(":")
    if not colon:
        return text, 1.0
    try:
        scale = float(tail)
    except ValueError:
        return text, 1.0
    if not abs(scale) <= MAX_SCALE:
        raise UsageError(f"{option} {text}: the scale {tail} is not between -1,000,000 and 1,000,000; "
                         "1 is as trained, 0 is off, negative is allowed")
    return head, scale


def find_adapter(argument: AdapterArgument, option: str = "--lora ") -> AdapterArgument:
    """The adapter on disk, or the sample adapter of that name. Raises UsageError, `option` in front of the path, when there is neither."""
    if path := _there(argument.path):
        return argument._replace(path=path)
    samples = dict(sample_adapters())
    if argument.path in samples:
        return AdapterArgument(str(samples[argument.path]), argument.name or argument.path, argument.scale)
    raise UsageError(f"{option}{argument.path or repr(argument.path)}: no such file or folder, and no sample adapter of that name; "
                     f"the samples are {', '.join(samples)}")


def adapters_of(texts: tuple[str, ...], option: str = "--lora") -> tuple[AdapterArgument, ...]:
    """The adapters of one mix, each once. Raises UsageError."""
    adapters = tuple(find_adapter(parse_adapter(text, option), f"{option} ") for text in texts)
    names = [adapter.name for adapter in adapters if adapter.name]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{option}: two adapters are called {doubled}; give one another name: NAME=PATH")
    return adapters


def find_model(text: str, default: str = "or no model for the default one") -> str:
    """A model's path that exists. Raises UsageError otherwise, which ends with how the default model is had."""
    if path := _there(text):
        return path
    if text in dict(sample_adapters()):
        raise UsageError(f"{text}: is a sample adapter, not a model; to open it on the default model: --lora {text}")
    raise UsageError(f"{text or repr(text)}: no such file or folder; give a local GGUF file or a Hugging Face folder with safetensors "
                     f"weights (nothing is downloaded by name), {default}")


def find_any(text: str) -> str:
    """The path of a model or an adapter, or of the sample adapter of that name. Raises UsageError when there is neither."""
    if path := _there(text):
        return path
    samples = dict(sample_adapters())
    if text in samples:
        return str(samples[text])
    raise UsageError(f"{text or repr(text)}: no such file or folder, and no sample adapter of that name; give a GGUF file, a Hugging Face "
                     f"folder, a PEFT adapter or a sample: {', '.join(samples)}")


def _there(text: str) -> str | None:
    """The path as it is written, `~` aside, if something is there; an empty one is none."""
    path = os.path.expanduser(text)  # as pathlib's, but a user that is not there is no error
    return path if text.strip() and os.path.exists(path) else None


def unescape(text: str) -> str:
    r"""A shell has no easy newline: `\n`, `\t` and `\\` are read as newline, tab and backslash; all else stays."""
    return re.sub(r"\\([nt\\])", lambda match: _ESCAPES[match[1]], text)


def escape(text: str) -> str:
    """What `unescape` turns into `text`."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


@dataclass(frozen=True)
class Within:
    """A check of a number's range, for the command line's parameters; NaN lies in none."""

    low: float
    high: float

    def __call__(self, type_: object, value: float) -> None:
        if not self.low <= value <= self.high:
            raise ValueError(f"A number from {self.low:g} to {self.high:g} is expected.")


def check_formats(dtype: str, weights: str) -> None:
    """Raises UsageError for a number format and weights that exclude each other."""
    if (dtype, weights) == ("packed", "dense"):
        raise UsageError("dtype packed and weights dense exclude each other; choose weights auto, or dtype fp32 or bf16")


def parse_size(text: str) -> int:
    """Bytes or a count from `4096`, `4k`, `512M`, `1.5GiB`; the letters stand for powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    value = float(match[1]) * 1024 ** _POWER[match[2].lower()] if match else math.inf
    if not value < 2**62:
        raise UsageError(f"{text!r} is not a size; write a number with k, M, G or T, for example 4k, 512M or 2G")
    return int(value)

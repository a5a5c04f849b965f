"""What a fuzz target is, and when what it did is a finding."""
from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

MAX_MESSAGE = 600
"""characters of a message, the folder's path not counted"""
MAX_SENTENCES = 3

Run = Callable[[bytes], None]
"""Gives an input to the real entry points. Returns when it is taken; raises what they raise, `Wrong` for a broken promise."""


class Wrong(Exception):
    """Something was accepted and then did not work, or left a trace where it should not."""


@dataclass(frozen=True)
class Target:
    """`seeds` are good inputs made here and now; `mutate(data, other, random)` breaks one, aware of its format."""

    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, bytes, Random], bytes]
    prepare: Callable[[Path], Run]
    """in a folder of its own, where the inputs are put"""
    documented: tuple[type[Exception], ...]
    """what a refusal may be"""
    names: Callable[[Path], str]
    """what every message must hold, given that folder"""
    seconds: float = 2.0
    """an input that takes more processor time, three times in a row, is a finding"""
    megabytes: float = 128
    """so much more memory than eight times the input may be touched"""


def target_names() -> list[str]:
    """The targets there are."""
    package = importlib.import_module("fuzz.targets")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def find_target(name: str) -> Target:
    """By the name of a file in `targets`; a name with a dot is that of any module ("mine." for one at the top)."""
    return importlib.import_module(name.rstrip(".") if "." in name else f"fuzz.targets.{name}").TARGET


def fault_of_message(message: str, folder: Path, must_hold: str) -> str:
    """What is wrong with the text of a refusal, "" when nothing is."""
    own = message.replace(str(folder), "")
    if must_hold not in message:
        return "message does not name the file"
    if not own.isprintable():
        return "message has control characters"
    if len(own) > MAX_MESSAGE:
        return f"message has {len(own)} characters"
    if len(re.findall(r"[.!?] +[A-Z]", own)) >= MAX_SENTENCES:
        return "message has too many sentences"
    return ""

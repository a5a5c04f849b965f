"""rank_pattern and alpha_pattern by PEFT's rule, with a bound on what a regular expression may cost. No torch."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from ..weights.files import show
from .errors import AdapterError

SECONDS = 3.0
"""what the patterns of one config may take; the longest honest ones take milliseconds"""
MAX_PATTERN = 2000
MAX_PATTERNS = 4096
MAX_INLINE = 1_000_000
"""pairs of a pattern and a name that are matched in this process, at about a microsecond each"""
Value = TypeVar("Value")

_PLAIN = re.compile(r"(?:[\w\-/:]|\\?\.|\[[\w\-]+\]|[\^$])*\Z")
"""one way to match at each place: such patterns cannot backtrack, whatever the name"""
_CHILD = """
import json, re, sys
keys, names = json.load(sys.stdin)
rules = [re.compile(rf"(.*\\.)?({key})$") for key in keys]
json.dump([[i for i, rule in enumerate(rules) if rule.match(name)] for name in names], sys.stdout)
"""


def lookup(pattern: Mapping[str, Value], names: Sequence[str], default: Value, where: str) -> list[Value]:
    """For every module name, the value of the first key that matches as `(.*\\.)?(key)$`, else `default`.

    `where` (file and field) is for messages. Raises AdapterError for a key that is no regular expression or takes too long.
    """
    found = _matches(tuple(pattern), tuple(names), where)
    keys = list(pattern)
    # PEFT falls back to a literal key; re has matched those, except keys with characters that re reads otherwise
    return [pattern[keys[indexes[0]]] if indexes else pattern.get(name, default) for name, indexes in zip(names, found, strict=True)]


def overlap(pattern: Mapping[str, Value], names: Sequence[str], where: str) -> tuple[str, str, str] | None:
    """The first module name that keys with different values match, with the key that holds and the next other one; None without any."""
    keys = list(pattern)
    for name, indexes in zip(names, _matches(tuple(pattern), tuple(names), where), strict=True):
        other = next((index for index in indexes if pattern[keys[index]] != pattern[keys[indexes[0]]]), None)
        if other is not None:
            return name, keys[indexes[0]], keys[other]
    return None


@lru_cache(maxsize=4)
def _matches(keys: tuple[str, ...], names: tuple[str, ...], where: str) -> list[list[int]]:
    """For every name the indexes of the keys that match it, in order."""
    if len(keys) > MAX_PATTERNS:
        raise AdapterError(f"{where}: {len(keys):,} patterns are over the limit of {MAX_PATTERNS:,}")
    for key in keys:
        _check(key, where)
    if not keys or not names:
        return [[] for _ in names]
    if len(keys) * len(names) <= MAX_INLINE and all(_PLAIN.match(key) for key in keys):
        rules = [re.compile(rf"(.*\.)?({key})$") for key in keys]
        return [[index for index, rule in enumerate(rules) if rule.match(name)] for name in names]
    return _matches_bounded(keys, names, where)


def _check(key: str, where: str) -> None:
    if len(key) > MAX_PATTERN:
        raise AdapterError(f"{where}: a pattern of {len(key):,} characters is over the limit of {MAX_PATTERN:,}")
    try:
        re.compile(f"(.*\\.)?({key})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{where}: {show(key)} is not a regular expression ({error}); correct the config") from None


def _matches_bounded(keys: Sequence[str], names: Sequence[str], where: str) -> list[list[int]]:
    """The same in a child process that can be stopped: `re` cannot be, once it has begun to backtrack."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD], input=json.dumps([keys, names]),
            capture_output=True, text=True, encoding="utf-8", timeout=SECONDS, check=True,
        )
    except subprocess.TimeoutExpired:
        raise AdapterError(f"{where}: matching {show(keys[0] if len(keys) == 1 else keys)} takes more than {SECONDS:g} s; "
                           "the pattern backtracks without end, simplify it") from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rsplit("\n", 1)[-1]
        raise AdapterError(f"{where}: the patterns could not be matched ({show(last)}); simplify them") from None
    return json.loads(child.stdout)

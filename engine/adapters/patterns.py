"""rank_pattern and alpha_pattern by PEFT's rule, with a bound on what a regular expression may cost. No torch."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ..weights.files import show
from .errors import AdapterError

SECONDS = 3.0
"""what the patterns of one config may take; the longest honest ones take milliseconds"""
MAX_PATTERN = 2000
Value = TypeVar("Value")

_PLAIN = re.compile(r"(?:[\w\-/:]|\\?\.|\[[\w\-]+\]|[\^$])*\Z")
"""one way to match at each place: such patterns cannot backtrack, whatever the name"""
_CHILD = """
import json, re, sys
keys, names = json.load(sys.stdin)
rules = [re.compile(rf"(.*\\.)?({key})$") for key in keys]
json.dump([next((i for i, rule in enumerate(rules) if rule.match(name)), -1) for name in names], sys.stdout)
"""


def lookup(pattern: Mapping[str, Value], names: Sequence[str], default: Value, where: str) -> list[Value]:
    """For every module name, the value of the first key that matches as `(.*\\.)?(key)$`, else `default`.

    `where` (file and field) is for messages. Raises AdapterError for a key that is no regular expression or takes too long.
    """
    keys = list(pattern)
    for key in keys:
        _check(key, where)
    if not keys or not names:
        return [default] * len(names)
    simple = all(_PLAIN.match(key) for key in keys)
    found = _first_matches(keys, names) if simple else _first_matches_bounded(keys, names, where)
    # PEFT falls back to a literal key; re has matched those, except keys with characters that re reads otherwise
    return [pattern.get(name, default) if index < 0 else pattern[keys[index]] for name, index in zip(names, found, strict=True)]


def _check(key: str, where: str) -> None:
    if len(key) > MAX_PATTERN:
        raise AdapterError(f"{where}: a pattern of {len(key):,} characters is over the limit of {MAX_PATTERN:,}")
    try:
        re.compile(f"(.*\\.)?({key})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{where}: {show(key)} is not a regular expression ({error}); correct the config") from None


def _first_matches(keys: Sequence[str], names: Sequence[str]) -> list[int]:
    rules = [re.compile(rf"(.*\.)?({key})$") for key in keys]
    return [next((index for index, rule in enumerate(rules) if rule.match(name)), -1) for name in names]


def _first_matches_bounded(keys: Sequence[str], names: Sequence[str], where: str) -> list[int]:
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

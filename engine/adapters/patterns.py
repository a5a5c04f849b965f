"""The regular expressions in a config by PEFT's rules, with a bound on what they may cost. No torch."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeVar

from ..weights.files import show
from .errors import AdapterError

SECONDS = 3.0
"""what the patterns of one config may take; the longest honest ones take milliseconds"""
MAX_PATTERN = 20_000
"""characters; some trainers write out every layer"""
MAX_PATTERNS = 4096
MAX_DOTS = 64
MAX_INLINE = 1_000_000
"""pairs of a pattern and a name that are matched in this process, at about a microsecond each"""
Value = TypeVar("Value")

_PLAIN = re.compile(r"(?:[\w\-/:]|\\?\.|\[[\w\-]+\]|[\^$])*\Z")
"""one way to match at each place: such patterns cannot backtrack, whatever the name"""
_CHILD = """
import json, re, sys
rules, method, names = json.load(sys.stdin)
rules = [getattr(re.compile(rule), method) for rule in rules]
json.dump([[i for i, rule in enumerate(rules) if rule(name)] for name in names], sys.stdout)
"""
Form = Literal["end", "whole", "part"]
_FORMS: dict[Form, tuple[str, str]] = {
    "end": (r"(.*\.)?({})$", "match"), "whole": ("{}", "fullmatch"), "part": (r"(^|.*\.){}($|\..*)", "match"),
}
"""how PEFT puts an expression about a name, and the function of `re` that it calls: rank_pattern, target_modules, modules_to_save"""


def lookup(pattern: Mapping[str, Value], names: Sequence[str], default: Value, where: str) -> list[Value]:
    """For every module name, the value of the first key that matches as `(.*\\.)?(key)$`, else `default`.

    `where` (file and field) is for messages. Raises AdapterError for a key that is no regular expression or takes too long.
    """
    found = _matches(tuple(pattern), tuple(names), where, "end")
    keys = list(pattern)
    # PEFT falls back to a literal key; re has matched those, except keys with characters that re reads otherwise
    return [pattern[keys[indexes[0]]] if indexes else pattern.get(name, default) for name, indexes in zip(names, found, strict=True)]


def overlap(pattern: Mapping[str, Value], names: Sequence[str], where: str) -> tuple[str, str, str] | None:
    """The first module name that keys with different values match, with the key that holds and the next other one; None without any."""
    keys = list(pattern)
    for name, indexes in zip(names, _matches(tuple(pattern), tuple(names), where, "end"), strict=True):
        other = next((index for index in indexes if pattern[keys[index]] != pattern[keys[indexes[0]]]), None)
        if other is not None:
            return name, keys[indexes[0]], keys[other]
    return None


def ends(name: str) -> Iterator[str]:
    """`name`, and what of it stands after each of its dots (of a name with more of them than any model has, itself alone)."""
    yield name
    at = name.find(".") if name.count(".") <= MAX_DOTS else -1
    while at >= 0:
        yield name[at + 1:]
        at = name.find(".", at + 1)


def ends_in(name: str, given: Container[str]) -> bool:
    """Whether `name`, or what follows one of its dots, is one of `given`: how PEFT reads a list of names."""
    return any(end in given for end in ends(name))


def matched(keys: Sequence[str], names: Sequence[str], where: str, form: Form) -> set[str]:
    """The names that one of `keys` matches. Errors as of `lookup`."""
    found = _matches(tuple(keys), tuple(names), where, form)
    return {name for name, indexes in zip(names, found, strict=True) if indexes}


@lru_cache(maxsize=8)
def _matches(keys: tuple[str, ...], names: tuple[str, ...], where: str, form: Form) -> list[list[int]]:
    """For every name the indexes of the keys that match it, in order."""
    if len(keys) > MAX_PATTERNS:
        raise AdapterError(f"{where}: {len(keys):,} patterns are over the limit of {MAX_PATTERNS:,}")
    around, method = _FORMS[form]
    rules = [_rule(key, around, where) for key in keys]
    if not keys or not names:
        return [[] for _ in names]
    if len(keys) * len(names) <= MAX_INLINE and all(_PLAIN.match(key) for key in keys):
        tests = [getattr(re.compile(rule), method) for rule in rules]
        return [[index for index, test in enumerate(tests) if test(name)] for name in names]
    return _matches_bounded(keys, rules, method, names, where)


def _rule(key: str, around: str, where: str) -> str:
    if len(key) > MAX_PATTERN:
        raise AdapterError(f"{where}: a pattern of {len(key):,} characters is over the limit of {MAX_PATTERN:,}")
    rule = around.replace("{}", key)
    try:
        re.compile(rule)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{where}: {show(key)} is not a regular expression ({error}); correct the config") from None
    return rule


def _matches_bounded(keys: Sequence[str], rules: Sequence[str], method: str, names: Sequence[str], where: str) -> list[list[int]]:
    """The same in a child process that can be stopped: `re` cannot be, once it has begun to backtrack."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD], input=json.dumps([rules, method, names]),
            capture_output=True, text=True, encoding="utf-8", timeout=SECONDS, check=True,
        )
    except subprocess.TimeoutExpired:
        raise AdapterError(f"{where}: matching {show(keys[0] if len(keys) == 1 else keys)} takes more than {SECONDS:g} s; "
                           "the pattern backtracks without end, simplify it") from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rsplit("\n", 1)[-1]
        raise AdapterError(f"{where}: the patterns could not be matched ({show(last)}); simplify them") from None
    return json.loads(child.stdout)

"""Typed look-ups in GGUF metadata and config.json, for which nobody vouches. No torch."""
from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.files import FormatError, show

GREATEST = 1e12
"""no number that matters to a model is greater"""


class Fields:
    """`fields` under `prefix`. A field that is null counts as missing; messages name `path` and the field."""

    def __init__(self, fields: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.fields, self.path, self.prefix = fields, path, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.fields.get(self.prefix + key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number; of a list with one for each layer, the one that all have."""
        value = self._needed(key, default)
        if isinstance(value, (list, array)) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or abs(value) >= 1 << 63:
            raise self.error(key, value, "a whole number is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._needed(key, default)
        if type(value) not in (int, float) or not abs(value) <= GREATEST:
            raise self.error(key, value, "a number is expected")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, value, "a positive number is expected")
        return value

    def at_least_0(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value < 0:
            raise self.error(key, value, "0 or a positive number is expected")
        return value

    def optional_number(self, key: str) -> float:
        """0 when the field is missing; a positive number otherwise."""
        return 0.0 if self.get(key) is None else self.positive(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._needed(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "true or false is expected")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        value = self._needed(key, None)
        good = isinstance(value, list) and len(value) == length
        if not good or not all(type(item) in (int, float) and math.isfinite(item) and item > 0 for item in value):
            raise self.error(key, value, f"a list of {length} positive numbers is expected")
        return tuple(map(float, value))

    def error(self, key: str, value: object, expected: str) -> FormatError:
        name = self.prefix + key
        return FormatError(f"{self.path}: {name if name.isprintable() and len(name) <= 80 else show(name)} is {show(value)}, {expected}")

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise FormatError(f"{self.path}: {self.prefix}{key} is missing; the file is incomplete or of another kind of model than "
                              "it says")
        return value

"""`adapter_config.json`, read and validated. No torch."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from ..weights.files import read_json_object, show
from .errors import AdapterError
from .fields import FIELDS, UNKNOWN, is_neutral

MAX_CONFIG_BYTES = 4 << 20
MAX_RANK = 1 << 16
MAX_INVOCATION = 1024
"""tokens; what is shown of an adapter holds them all"""
PEFT_DEFAULT = 8
"""what PEFT takes for r and lora_alpha when a config leaves them out"""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The fields that we honour. `rank_pattern` and `alpha_pattern` keep the order of the file: the first match wins."""

    r: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    targets: tuple[str, ...] | str
    """names, a regular expression or a shorthand such as "all-linear"; empty when not given"""
    invocation: tuple[int, ...]
    base_model: str
    notes: tuple[str, ...]

    def scaling(self, alpha: float, rank: int) -> float:
        return alpha / sqrt(rank) if self.rslora else alpha / rank


def read_settings(path: Path) -> LoraSettings:
    """The settings in the config file `path`. Raises AdapterError, FormatError or OSError naming the field and its value."""
    raw = read_json_object(path, MAX_CONFIG_BYTES)
    _check_type(raw, path)
    _refuse_what_is_not_honoured(raw, path)
    notes = tuple(f"{field} is absent from the config: PEFT's default of {PEFT_DEFAULT} holds" for field in ("r", "lora_alpha")
                  if field not in raw)
    return LoraSettings(
        r=_rank(raw.get("r", PEFT_DEFAULT), "r", path),
        alpha=_alpha(raw.get("lora_alpha", PEFT_DEFAULT), "lora_alpha", path),
        rank_pattern={key: _rank(value, f"rank_pattern[{show(key)}]", path) for key, value in _object(raw, "rank_pattern", path).items()},
        alpha_pattern={
            key: _alpha(value, f"alpha_pattern[{show(key)}]", path) for key, value in _object(raw, "alpha_pattern", path).items()
        },
        rslora=_flag(raw, "use_rslora", path),
        targets=_targets(raw, path),
        invocation=_invocation(raw, path),
        base_model=raw["base_model_name_or_path"][:300] if isinstance(raw.get("base_model_name_or_path"), str) else "",
        notes=notes,
    )


def _check_type(raw: Mapping[str, Any], path: Path) -> None:
    kind = raw.get("peft_type")
    if kind == "LORA":
        return
    if kind is None:
        raise AdapterError(f"{path}: has no peft_type; a config written by PEFT is expected "
                           "(adapters of MLX or other formats are not read yet)")
    raise AdapterError(f"{path}: peft_type is {_shown(kind)}, not honoured yet; only LORA is")


def _refuse_what_is_not_honoured(raw: Mapping[str, Any], path: Path) -> None:
    for name, value in raw.items():
        field = FIELDS.get(name, UNKNOWN)
        if field.verdict == "neutral" and not is_neutral(field, value):
            raise AdapterError(f"{path}: {show(name)} is {_shown(value)} ({field.meaning}), not honoured yet; "
                               "the adapter would not act as it was trained, so it is not loaded")


def _shown(value: Any) -> str:
    """A value of the config as JSON, cut and made harmless."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _rank(value: Any, name: str, path: Path) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"{path}: the rank {name} is {_shown(value)}; a positive whole number up to {MAX_RANK:,} is expected")
    return value


def _alpha(value: Any, name: str, path: Path) -> float:
    # the bound keeps a whole number that no float holds out of isfinite
    if type(value) not in (int, float) or not abs(value) < 1e30 or not isfinite(value):
        raise AdapterError(f"{path}: the alpha {name} is {_shown(value)}; a finite number is expected")
    return float(value)


def _flag(raw: Mapping[str, Any], name: str, path: Path) -> bool:
    value = raw.get(name)
    if value is None or type(value) is bool:
        return bool(value)
    raise AdapterError(f"{path}: {name} is {_shown(value)}; true or false is expected")


def _object(raw: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    value = raw.get(name)
    if value is None or isinstance(value, dict):
        return value or {}
    raise AdapterError(f"{path}: {name} is {_shown(value)}; an object from module patterns to numbers is expected")


def _targets(raw: Mapping[str, Any], path: Path) -> tuple[str, ...] | str:
    value = raw.get("target_modules")
    if value is None or isinstance(value, str):
        return value or ()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise AdapterError(f"{path}: target_modules is {_shown(value)}; a list of module names or a text is expected")


def _invocation(raw: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    value = raw.get("alora_invocation_tokens")
    if value is None:
        return ()
    if isinstance(value, list) and 1 <= len(value) <= MAX_INVOCATION and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise AdapterError(f"{path}: alora_invocation_tokens is {_shown(value)}; a list of 1 to {MAX_INVOCATION} token ids is expected")

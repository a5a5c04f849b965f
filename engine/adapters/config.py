"""`adapter_config.json`, read and validated. No torch."""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from ..weights.files import read_json_object, show
from .errors import AdapterError
from .fields import refusal, shown

MAX_CONFIG_BYTES = 4 << 20
MAX_RANK = 1 << 16
MAX_INVOCATION = 1024
"""tokens; what is shown of an adapter holds them all"""
MAX_TOKEN_ROWS = 1 << 20
_LAYERS_NAME = re.compile(r"[\w.\-]{0,200}\Z")
PEFT_DEFAULT = 8
"""what PEFT takes for r and lora_alpha when a config leaves them out"""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The fields that we honour. `rank_pattern` and `alpha_pattern` keep the order of the file: the first match wins."""

    r: int | None
    """None: the tensors alone say it"""
    alpha: float | None
    """None: the effective scale is `scale` whatever the rank"""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    scale: float = 1.0
    dora: bool | None = False
    """None: the tensors alone say it; likewise `lora_bias`"""
    lora_bias: bool | None = False
    bias: str = "none"
    by_config: bool = False
    """whether the fields from here to `saved` say where it acts; else the tensors alone do"""
    targets: tuple[str, ...] | str | None = None
    """names, a regular expression or a shorthand such as "all-linear"; None when not given"""
    excluded: tuple[str, ...] | str = ()
    """exclude_modules"""
    layers: frozenset[int] = frozenset()
    """layers_to_transform; empty: all"""
    layers_patterns: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    """target_parameters"""
    saved: tuple[str, ...] = ()
    """modules_to_save"""
    token_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """trainable_token_indices: the last part of a module's name -> token ids, in the order of its trained rows"""
    replication: tuple[tuple[int, int], ...] = ()
    tying: bool = False
    """ensure_weight_tying"""
    invocation: tuple[int, ...] = ()
    base_model: str = ""
    notes: tuple[str, ...] = ()

    def scaling(self, alpha: float | None, rank: int) -> float:
        if alpha is None:
            return self.scale
        return alpha / sqrt(rank) if self.rslora else alpha / rank


def read_settings(path: Path) -> LoraSettings:
    """The settings in the config file `path`. Raises AdapterError, FormatError or OSError naming the field and its value."""
    return parse_settings(read_json_object(path, MAX_CONFIG_BYTES), path)


def parse_settings(raw: Mapping[str, Any], path: Path) -> LoraSettings:
    """The settings in the object `raw` of the file `path`. Raises AdapterError naming the field and its value."""
    _check_type(raw, path)
    for name, value in raw.items():
        if why := refusal(name, value, raw):
            raise AdapterError(f"{path}: {show(name)} is {shown(value)}: {why}; the adapter would not act as it was trained, "
                               "so it is not loaded")
    read = _Reader(raw, path)
    notes = tuple(f"{name} is absent from the config: PEFT's default of {PEFT_DEFAULT} holds" for name in ("r", "lora_alpha")
                  if name not in raw)
    return LoraSettings(
        r=read.rank(raw.get("r", PEFT_DEFAULT), "r"),
        alpha=read.alpha(raw.get("lora_alpha", PEFT_DEFAULT), "lora_alpha"),
        rank_pattern={key: read.rank(value, f"rank_pattern[{show(key)}]") for key, value in read.object("rank_pattern").items()},
        alpha_pattern={key: read.alpha(value, f"alpha_pattern[{show(key)}]") for key, value in read.object("alpha_pattern").items()},
        rslora=read.flag("use_rslora"), dora=read.flag("use_dora"), lora_bias=read.flag("lora_bias"),
        tying=read.flag("ensure_weight_tying"),
        bias=_bias(raw, path), by_config=True,
        targets=None if raw.get("target_modules") is None else read.names_or_text("target_modules"),
        excluded=read.names_or_text("exclude_modules"), layers=_layers(raw, path), layers_patterns=_layers_patterns(raw, read),
        parameters=read.names("target_parameters"), saved=read.names("modules_to_save"),
        token_rows=_token_rows(raw, path), replication=_replication(raw, path), invocation=_invocation(raw, path),
        base_model=raw["base_model_name_or_path"][:300] if isinstance(raw.get("base_model_name_or_path"), str) else "",
        notes=notes,
    )


class _Reader:
    """Typed look-ups in a config that nobody vouches for."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw, self.path = raw, path

    def rank(self, value: Any, name: str) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise AdapterError(f"{self.path}: the rank {name} is {shown(value)}; a positive whole number up to {MAX_RANK:,} is expected")
        return value

    def alpha(self, value: Any, name: str) -> float:
        # the bound keeps a whole number that no float holds out of isfinite
        if type(value) not in (int, float) or not abs(value) < 1e30 or not isfinite(value):
            raise AdapterError(f"{self.path}: the alpha {name} is {shown(value)}; a finite number is expected")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is None or type(value) is bool:
            return bool(value)
        raise AdapterError(f"{self.path}: {name} is {shown(value)}; true or false is expected")

    def object(self, name: str) -> Mapping[str, Any]:
        value = self.raw.get(name)
        if value is None or isinstance(value, dict):
            return value or {}
        raise AdapterError(f"{self.path}: {name} is {shown(value)}; an object from module patterns to numbers is expected")

    def names(self, name: str) -> tuple[str, ...]:
        value = self.raw.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise AdapterError(f"{self.path}: {name} is {shown(value)}; a list of module names is expected")

    def names_or_text(self, name: str) -> tuple[str, ...] | str:
        value = self.raw.get(name)
        return value if isinstance(value, str) else self.names(name)


def _check_type(raw: Mapping[str, Any], path: Path) -> None:
    if raw.get("peft_type") is None:
        raise AdapterError(f"{path}: has no peft_type; a config written by PEFT is expected "
                           "(adapters of MLX or other formats are not read: save it in PEFT's format)")


def _bias(raw: Mapping[str, Any], path: Path) -> str:
    value = raw.get("bias") or "none"
    if value not in ("none", "all", "lora_only"):
        raise AdapterError(f"{path}: bias is {shown(value)}; none, all or lora_only is expected")
    return value


def _token_rows(raw: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    value = raw.get("trainable_token_indices")
    by_layer = {"embed_tokens": value} if isinstance(value, list) else value
    if not value:
        return {}
    if not isinstance(by_layer, dict) or not all(_ids(ids, MAX_TOKEN_ROWS) for ids in by_layer.values()):
        raise AdapterError(f"{path}: trainable_token_indices is {shown(value)}; a list of different token ids, or an object from module "
                           "names to such lists is expected")
    rows = {name.rsplit(".", 1)[-1]: tuple(ids) for name, ids in by_layer.items()}
    if len(rows) < len(by_layer):
        raise AdapterError(f"{path}: trainable_token_indices is {shown(value)}; it names one module twice, it is ambiguous which ids hold")
    return rows


def _ids(value: Any, limit: int) -> bool:
    return isinstance(value, list) and len(value) <= limit and all(type(item) is int and 0 <= item < 1 << 31 for item in value) \
        and len(set(value)) == len(value)


def _replication(raw: Mapping[str, Any], path: Path) -> tuple[tuple[int, int], ...]:
    value = raw.get("layer_replication") or []
    if not isinstance(value, list) or not all(
            isinstance(item, list) and len(item) == 2 and all(type(end) is int and 0 <= end < 1 << 20 for end in item) for item in value):
        raise AdapterError(f"{path}: layer_replication is {shown(value)}; a list of [first, end] layers is expected")
    return tuple((first, end) for first, end in value)


def _layers(raw: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = raw.get("layers_to_transform")
    layers = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(layer) is int for layer in layers):
        raise AdapterError(f"{path}: layers_to_transform is {shown(value)}; a layer's number or a list of them is expected")
    for name in ("layers_to_transform", "layers_pattern"):
        if raw.get(name) not in (None, [], "") and isinstance(raw.get("target_modules"), str):
            raise AdapterError(f"{path}: {name} is {shown(raw[name])} beside {shown(raw['target_modules'])} in target_modules; PEFT takes "
                               "it beside a list of names alone, put the layers into one of them")
    return frozenset(layers)


def _layers_patterns(raw: Mapping[str, Any], read: _Reader) -> tuple[str, ...]:
    value = raw.get("layers_pattern")
    patterns = (value,) if isinstance(value, str) and value else () if value == "" else read.names("layers_pattern")
    if len(patterns) > 16 or not all(map(_LAYERS_NAME.match, patterns)):
        raise AdapterError(f"{read.path}: layers_pattern is {shown(value)}; the name of the list of layers is expected, as \"layers\"")
    if patterns and raw.get("layers_to_transform") is None:
        raise AdapterError(f"{read.path}: layers_pattern is {shown(value)} without layers_to_transform, which PEFT refuses; "
                           "set both or none")
    return patterns


def _invocation(raw: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    value = raw.get("alora_invocation_tokens")
    if value is None:
        return ()
    return check_invocation(value, f"{path}: alora_invocation_tokens")


def check_invocation(value: Any, what: str) -> tuple[int, ...]:
    """`value` as token ids of an aLoRA's invocation. Raises AdapterError that begins with `what` (file and field)."""
    if isinstance(value, list) and 1 <= len(value) <= MAX_INVOCATION and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise AdapterError(f"{what} is {shown(value)}; a list of 1 to {MAX_INVOCATION} token ids is expected")

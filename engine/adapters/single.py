"""An adapter in one safetensors file whose metadata says what PEFT keeps in adapter_config.json. Headers only, no torch."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..weights.files import FormatError, parse_json_object, show
from ..weights.safetensors import read_header
from .card import cut_metadata
from .config import MAX_CONFIG_BYTES, LoraSettings, parse_settings
from .errors import AdapterError
from .file import AdapterFile
from .keys import sort_names
from .peft import CONFIG, check_types

CONFIG_KEYS = ("adapter_config", CONFIG, "peft_config", "lora_config", "lora_adapter_metadata")
"""metadata that may hold a whole config as JSON"""
RANK_KEYS = ("r", "rank", "lora_r", "lora_rank", "ss_network_dim")
ALPHA_KEYS = ("lora_alpha", "alpha", "ss_network_alpha")


def open_single(path: Path) -> AdapterFile:
    """The adapter in the file `path`, which no config lies beside. Raises AdapterError, FormatError or OSError naming what is missing."""
    header = read_header(path)
    check_types(header.tensors.values(), path)
    names = sort_names(header.tensors, path)
    settings = _settings(header.metadata, path)
    return AdapterFile(path, path, path, "safetensors with metadata", settings, header.tensors, names, header.file_bytes, settings.notes,
                       metadata=cut_metadata(header.metadata), metadata_keys=len(header.metadata))


def _settings(metadata: Mapping[str, str], path: Path) -> LoraSettings:
    for key in CONFIG_KEYS:
        if metadata.get(key, "").lstrip().startswith("{") and len(metadata[key]) <= MAX_CONFIG_BYTES:
            config = {"peft_type": "LORA"} | _object(metadata[key], key, path)
            settings = parse_settings(config, path)
            # PEFT reads no such file: its default for a config without target_modules is not meant
            return replace(settings, by_config=settings.targets is not None)
    alpha = _number(metadata, ALPHA_KEYS, path)
    if alpha is None:
        raise AdapterError(f"{path}: nothing says alpha, without which the scale is not known: there is no {CONFIG} beside it, and its "
                           f"metadata has neither a config ({', '.join(CONFIG_KEYS[:2])}) nor {' or '.join(ALPHA_KEYS)}; put the {CONFIG} "
                           "of the adapter beside the file")
    rank = _number(metadata, RANK_KEYS, path)
    config: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": alpha,
                              "r": 1 if rank is None else int(rank) if rank.is_integer() else rank}
    settings = parse_settings(config, path)
    return LoraSettings(r=settings.r if rank is not None else None, alpha=settings.alpha, dora=None, lora_bias=None,
                        notes=("alpha is taken from the file's metadata, which names no other setting: plain LoRA is assumed",))


def _object(text: str, key: str, path: Path) -> dict[str, Any]:
    try:
        return parse_json_object(text.encode("utf-8", "surrogatepass"), path)
    except FormatError as error:
        raise AdapterError(f"{path}: the metadata {show(key)} cannot be read as a config: {error}") from None


def _number(metadata: Mapping[str, str], keys: tuple[str, ...], path: Path) -> float | None:
    for key in keys:
        if key in metadata:
            try:
                value = float(metadata[key])
                return value if abs(value) < 1e30 else float("nan")
            except ValueError:
                raise AdapterError(f"{path}: the metadata {key} is {show(metadata[key])}; a number is expected") from None
    return None

"""Adapters as mlx-lm saves them: adapter_config.json beside adapters.safetensors. Headers only, no torch.

MODULE.lora_a [d_in, r] and MODULE.lora_b [r, d_out] are PEFT's A and B transposed, MODULE.m is DoRA's magnitude, and
y += scale * ((x lora_a) lora_b) with the config's lora_parameters.scale: it is not divided by the rank.
"""
from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any

from ..weights.files import read_json_object, show
from ..weights.safetensors import read_header
from .card import cut_metadata, read_card
from .config import MAX_CONFIG_BYTES, LoraSettings
from .errors import AdapterError
from .fields import shown
from .file import AdapterFile
from .keys import PairNames, TensorNames
from .peft import CONFIG, check_types

WEIGHTS = "adapters.safetensors"


def open_mlx(given: Path, folder: Path) -> AdapterFile:
    """The adapter in `folder`; `given` is what the user named. Raises AdapterError, FormatError or OSError naming the field or tensor."""
    raw = read_json_object(folder / CONFIG, MAX_CONFIG_BYTES)
    settings = _settings(raw, folder / CONFIG)
    header = read_header(folder / WEIGHTS)
    check_types(header.tensors.values(), folder / WEIGHTS)
    names = _sort(header.tensors, folder / WEIGHTS)
    return AdapterFile(given, folder / CONFIG, folder / WEIGHTS, "MLX", settings, header.tensors, names, header.file_bytes,
                       metadata=cut_metadata(header.metadata), metadata_keys=len(header.metadata), card=read_card(folder))


def _settings(raw: dict[str, Any], path: Path) -> LoraSettings:
    kind, parameters = raw.get("fine_tune_type", "lora"), raw.get("lora_parameters")
    if kind not in ("lora", "dora") or not isinstance(parameters, dict):
        raise AdapterError(f"{path}: is an MLX adapter of fine_tune_type {shown(kind)} with lora_parameters {shown(parameters)}; lora or "
                           "dora with its rank and scale is read")
    if "alpha" in parameters:
        raise AdapterError(f"{path}: lora_parameters has alpha, as early versions of mlx-lm wrote it with another meaning of scale; "
                           "it is not known which holds, so it is not loaded")
    scale = parameters.get("scale")
    if type(scale) not in (int, float) or not abs(scale) < 1e30 or not isfinite(scale):
        raise AdapterError(f"{path}: lora_parameters.scale is {shown(scale)}; a finite number is expected")
    base = raw.get("model")
    return LoraSettings(r=None, alpha=None, scale=float(scale), dora=kind == "dora", base_model=base[:300] if isinstance(base, str) else "")


def _sort(names: Iterable[str], path: Path) -> TensorNames:
    parts: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        module, _, kind = name.rpartition(".")
        if kind not in ("lora_a", "lora_b", "m"):
            raise AdapterError(f"{path}: tensor {show(name, 160)} is neither lora_a nor lora_b nor m of a module; without it the adapter "
                               "would act otherwise than trained, so it is not loaded")
        parts.setdefault(module, {})[kind] = name
    if not parts:
        raise AdapterError(f"{path}: holds no tensors; save the adapter again")
    for module, found in parts.items():
        if missing := {"lora_a", "lora_b"} - found.keys():
            raise AdapterError(f"{path}: {min(missing)} of the module {show(module, 160)} is missing; the file is incomplete")
    pairs = tuple(PairNames(module, found["lora_a"], found["lora_b"], magnitude=found.get("m", ""),
                            embedding=module.rpartition(".")[2] == "embed_tokens") for module, found in parts.items())
    return TensorNames(pairs, turned=frozenset(name for found in parts.values() for kind, name in found.items() if kind != "m"))

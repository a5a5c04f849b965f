"""Adapters as PEFT saves them: `adapter_config.json` beside `adapter_model.safetensors` or `.bin`. Headers only, no torch."""
from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..weights.entry import TensorEntry
from ..weights.files import open_regular, show
from ..weights.safetensors import read_header
from .config import read_settings
from .errors import AdapterError
from .file import AdapterFile
from .keys import pair_names

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
FLOATS = ("F32", "F16", "BF16", "F64")


def open_peft(given: Path) -> AdapterFile:
    """The adapter in the folder `given`, or the one that the file `given` (config or weights) belongs to.

    Raises AdapterError, FormatError or OSError with a sentence that names the file.
    """
    folder, weights = _locate(given)
    settings = read_settings(folder / CONFIG)
    notes = list(settings.notes)
    if weights is None:
        weights = _weights_in(folder)
        if weights.name == SAFETENSORS and os.path.lexists(folder / PICKLE):
            notes.append(f"{SAFETENSORS} is used; {PICKLE} beside it is not read")
    if weights.suffix == ".safetensors":
        header = read_header(weights)
        entries = header.tensors
        _check_entries(entries, weights)
        pair_names(entries, weights)
        return AdapterFile(given, folder / CONFIG, weights, "PEFT safetensors", settings, entries, header.file_bytes, tuple(notes))
    with open_regular(weights) as stream:
        size = os.fstat(stream.fileno()).st_size
    return AdapterFile(given, folder / CONFIG, weights, "PEFT bin", settings, None, size, tuple(notes))


def _locate(given: Path) -> tuple[Path, Path | None]:
    """The folder of an adapter, and its weights when `given` names them."""
    if not os.path.lexists(given):
        raise AdapterError(f"{given}: no such file or folder (adapters are local, nothing is fetched); give the path of a PEFT adapter")
    if given.is_dir():
        folder, weights = given, None
    elif given.name == CONFIG:
        folder, weights = given.parent, None
    elif given.suffix in (".safetensors", ".bin"):
        folder, weights = given.parent, given
    else:
        raise AdapterError(f"{given}: is no PEFT adapter; give a folder with {CONFIG} and {SAFETENSORS}, or one of these files"
                           + (" (GGUF adapters are not read yet)" if given.suffix == ".gguf" else ""))
    if not os.path.lexists(folder / CONFIG):
        raise AdapterError(f"{folder}: has no {CONFIG}{_what_else(folder)}; give the folder that PEFT saved the adapter to")
    return folder, weights


def _what_else(folder: Path) -> str:
    if os.path.lexists(folder / "adapters.safetensors"):
        return " (it looks like an MLX adapter, a format that is not read yet)"
    if os.path.lexists(folder / "config.json"):
        return " (it looks like a base model: load it as the base)"
    return ""


def _weights_in(folder: Path) -> Path:
    for name in (SAFETENSORS, PICKLE):
        if os.path.lexists(folder / name):
            return folder / name
    raise AdapterError(f"{folder}: has {CONFIG} but neither {SAFETENSORS} nor {PICKLE}{_what_else(folder)}; the weights are missing, "
                       "save or download them again")


def _check_entries(entries: Mapping[str, TensorEntry], weights: Path) -> None:
    for entry in entries.values():
        if entry.type not in FLOATS:
            raise AdapterError(f"{weights}: tensor {show(entry.name, 160)} has dtype {entry.type}; the weights of an adapter are "
                               "F32, F16 or BF16, save it again in one of these")

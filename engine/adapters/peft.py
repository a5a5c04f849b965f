"""Adapters as PEFT saves them: `adapter_config.json` beside `adapter_model.safetensors` or `.bin`. Headers only, no torch."""
from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from ..weights.entry import TensorEntry
from ..weights.files import open_regular, show
from ..weights.safetensors import SafetensorsHeader, read_header
from .card import cut_metadata, read_card
from .config import read_settings
from .errors import AdapterError
from .file import AdapterFile
from .keys import sort_names

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
FLOATS = ("F32", "F16", "BF16", "F64")
MAX_ENTRIES = 10_000
"""of a folder that are looked at"""
_WEIGHTS = re.compile(r"\.(?:safetensors|bin|pt|pth)\Z")
_KNOWN = re.compile(r"adapter_model|optimizer|scheduler|scaler|rng_state|random_states|training_args|trainer_state|\.")
"""how the names begin of the adapter itself and of what a trainer leaves to go on from"""
_SHARD = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors")


def open_peft(given: Path, folder: Path, weights: Path | None = None) -> AdapterFile:
    """The adapter in `folder`, with the tensors of `weights` or of the file that PEFT gives them; `given` is what the user named.

    Raises AdapterError, FormatError or OSError with a sentence that names the file.
    """
    settings = read_settings(folder / CONFIG)
    notes = list(settings.notes)
    if weights is None:
        weights = _weights_in(folder)
        if weights.name == SAFETENSORS and os.path.lexists(folder / PICKLE):
            notes.append(f"{SAFETENSORS} is used; {PICKLE} beside it is not read")
    notes += _unread(folder, weights.name)
    tokenizer = folder / "tokenizer.json"
    beside = {"card": read_card(folder), "tokenizer_json": tokenizer if tokenizer.is_file() else None}
    if weights.suffix == ".safetensors":
        header = _shards(weights) if _SHARD.fullmatch(weights.name) else read_header(weights)
        check_types(header.tensors.values(), weights)
        return AdapterFile(
            given, folder / CONFIG, weights, "PEFT safetensors", settings, header.tensors, sort_names(header.tensors, weights),
            header.file_bytes, tuple(notes), metadata=cut_metadata(header.metadata), metadata_keys=len(header.metadata), **beside)
    with open_regular(weights) as stream:
        size = os.fstat(stream.fileno()).st_size
    return AdapterFile(given, folder / CONFIG, weights, "PEFT bin", settings, None, None, size, tuple(notes), **beside)


def check_types(entries: Iterable[TensorEntry], weights: Path, types: Iterable[str] = FLOATS) -> None:
    """Raises AdapterError for a tensor of a type that the weights of an adapter do not have."""
    for entry in entries:
        if entry.type not in types:
            raise AdapterError(f"{weights}: tensor {show(entry.name, 160)} has dtype {entry.type}; the weights of an adapter are "
                               "F32, F16 or BF16, save it again in one of these")


def what_else(folder: Path) -> str:
    """What a folder that is no adapter looks like, as a clause; "" when like nothing known."""
    if os.path.lexists(folder / "config.json"):
        return " (it looks like a base model: load it as the base)"
    ggufs = sorted(path.name for path in folder.glob("*.gguf")) if folder.is_dir() else []
    return f" (it holds {show(ggufs[0])}: give that file)" if ggufs else ""


def _unread(folder: Path, weights: str) -> list[str]:
    """A note of what else in the folder looks like trained weights; the state of a trainer and the adapter in another form do not."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES) if _WEIGHTS.search(entry.name) and not _KNOWN.match(entry.name))
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{', '.join(show(name, 80) for name in names[:3])}{more} beside {weights}: not read, as PEFT does not; "
            "what was trained is missing if it is there"]


def _weights_in(folder: Path) -> Path:
    for name in (SAFETENSORS, PICKLE):
        if os.path.lexists(folder / name):
            return folder / name
    shards = sorted(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name))
    if shards:
        return folder / shards[0]
    raise AdapterError(f"{folder}: has {CONFIG} but neither {SAFETENSORS} nor {PICKLE}{what_else(folder)}; the weights are missing, "
                       "save or download them again")


def _shards(first: Path) -> SafetensorsHeader:
    """The files of which `first` is one, as one header. Raises AdapterError for one that is missing and a tensor in two."""
    count = int(_SHARD.fullmatch(first.name)[2])
    names = sorted(path.name for path in first.parent.iterdir() if (found := _SHARD.fullmatch(path.name)) and int(found[2]) == count)
    if len(names) != count:
        raise AdapterError(f"{first.parent}: holds {len(names)} of the {count} files adapter_model-…-of-{count:05}.safetensors; "
                           "download the others")
    tensors: dict[str, TensorEntry] = {}
    metadata: Mapping[str, str] = {}
    total = 0
    for header in (read_header(first.parent / name) for name in names):
        if twice := tensors.keys() & header.tensors.keys():
            raise AdapterError(f"{header.path}: tensor {show(min(twice), 160)} is also in another of the {count} files; "
                               "download them again")
        tensors |= header.tensors
        metadata, total = metadata or header.metadata, total + header.file_bytes
    return SafetensorsHeader(first, dict(metadata), tensors, total)

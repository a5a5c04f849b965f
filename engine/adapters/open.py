"""Any adapter file, by what it is. Headers only, no torch."""
from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from ..hub_cache import is_cache_entry, snapshots
from ..weights.files import FormatError, open_regular, show
from ..weights.gguf import read_header as gguf_header
from .errors import AdapterError
from .family import members
from .file import AdapterFile
from .gguf import open_gguf
from .mlx import WEIGHTS as MLX_WEIGHTS
from .mlx import open_mlx
from .peft import CONFIG, PICKLE, SAFETENSORS, open_peft, what_else
from .single import open_single

CONTAINERS = {
    "PEFT folder, safetensors": f"{CONFIG} with {SAFETENSORS}, also in numbered parts",
    "PEFT folder, pickle": f"{CONFIG} with {PICKLE}: tensors alone, code in it is never run",
    "one safetensors file": "with its adapter_config, or rank and alpha, in the file's metadata",
    "GGUF": "adapters of llama.cpp's converter, of F32, F16, BF16 or Q8_0, aLoRA included",
    "MLX folder": f"{CONFIG} with {MLX_WEIGHTS}, LoRA and DoRA",
    "a run's folder": "of checkpoint-STEP folders: the newest is opened",
    "an entry of the Hugging Face cache": "models--OWNER--NAME: the snapshot of its main reference is opened",
}
"""what an adapter may come in, for the documentation"""
NEWEST_OPENED = "is opened, the newest"
"""of the note on a run's folder: what was done, and nothing to look into"""


def open_adapter(path: str | os.PathLike[str]) -> AdapterFile:
    """The adapter at `path`: a folder, or a file of one.

    Of a folder of checkpoint-STEP folders it is the newest, under its own path, said in a note.
    Raises AdapterError, FormatError or OSError with a sentence that names the file.
    """
    given = Path(os.path.expanduser(path))
    if not os.path.lexists(given):
        raise AdapterError(f"{given}: no such file or folder (adapters are local, nothing is fetched); give the path of an adapter")
    return _open_folder(given) if given.is_dir() else _open_file(given)


def is_adapter(path: Path) -> bool:
    """Whether `path` looks like an adapter rather than a base: by the names in a folder, by the kind that a GGUF file states."""
    if path.is_dir():
        if is_cache_entry(path):
            return _cached(path) is not None
        return not _is_base(path) and (any(os.path.lexists(path / name) for name in (CONFIG, SAFETENSORS, PICKLE, MLX_WEIGHTS))
                                       or bool(members(path)))
    if path.name in (CONFIG, SAFETENSORS, PICKLE, MLX_WEIGHTS):
        return True
    if path.suffix in (".safetensors", ".bin"):
        return os.path.lexists(path.parent / CONFIG) or not os.path.lexists(path.parent / "config.json")
    return path.is_file() and _states_adapter(path)


def _is_base(folder: Path) -> bool:
    """A folder may hold a whole model beside an adapter, and an adapter the config.json of its base."""
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    return os.path.lexists(folder / "config.json") and (
        not os.path.lexists(folder / CONFIG) or any(os.path.lexists(folder / name) for name in weights))


def _states_adapter(path: Path) -> bool:
    """Whether a GGUF file says that it is an adapter. Mostly among its first keys; between key and text lie their type and length."""
    with open_regular(path) as stream:
        head = stream.read(1 << 16)
    if not head.startswith(b"GGUF") or re.search(rb"general\.type.{12}adapter", head, re.DOTALL):
        return head.startswith(b"GGUF")
    try:
        metadata = gguf_header(path).metadata
    except FormatError:  # opened as a base it is refused with the reason
        return False
    return metadata.get("general.type") == "adapter" or "adapter.type" in metadata


def _open_folder(given: Path) -> AdapterFile:
    if is_cache_entry(given) and (snapshot := _cached(given)) is not None:
        return _open_folder(snapshot)
    if os.path.lexists(given / CONFIG):
        return open_mlx(given, given) if _is_mlx(given) else open_peft(given, given)
    if found := members(given):
        newest = found[-1]
        others = f" of {len(found)} checkpoints" if len(found) > 1 else " checkpoint"
        file = _open_folder(newest.path)
        return replace(file, notes=(*file.notes, f"{newest.path.name} {NEWEST_OPENED}{others}"))
    raise AdapterError(f"{given}: has no {CONFIG}{what_else(given)}; give the folder that the adapter was saved to")


def _cached(entry: Path) -> Path | None:
    """The adapter in an entry of the Hugging Face cache: the snapshot of refs/main, or the newest, that is one."""
    return next((path for path in snapshots(entry) if os.path.lexists(path / CONFIG) and not _is_base(path)), None)


def _is_mlx(folder: Path) -> bool:
    return os.path.lexists(folder / MLX_WEIGHTS) and not os.path.lexists(folder / SAFETENSORS)


def _open_file(given: Path) -> AdapterFile:
    folder = given.parent
    if given.name == CONFIG:
        return replace(_open_folder(folder), path=given)
    if given.name == MLX_WEIGHTS and os.path.lexists(folder / CONFIG):
        return open_mlx(given, folder)
    if given.suffix in (".safetensors", ".bin") and os.path.lexists(folder / CONFIG):
        return open_peft(given, folder, given)
    with open_regular(given) as stream:
        magic = stream.read(4)
    if magic == b"GGUF" or given.suffix == ".gguf":
        return open_gguf(given)
    if given.suffix == ".safetensors":
        return open_single(given)
    if given.suffix == ".bin":
        raise AdapterError(f"{folder}: has no {CONFIG}; a .bin holds tensors alone, put the config that PEFT saved with it beside it")
    raise AdapterError(f"{given}: is no adapter ({show(given.suffix)}); give a folder with {CONFIG} and {SAFETENSORS}, one of these files, "
                       "or a GGUF adapter")

"""Opening a base: a GGUF file or a Hugging Face folder. Headers only, no torch."""
from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from .base_folder import read_folder_base
from .base_gguf import read_gguf_base
from .base_parts import BaseFile, TokenizerSource
from .hub_cache import is_cache_entry, snapshot_of
from .weights.files import FormatError, open_regular
from .weights.safetensors import INDEX, SINGLE

__all__ = ["BaseFile", "FormatError", "TokenizerSource", "open_base"]


NO_TEMPLATE = "no chat template in the model's files: messages are laid out as plain \"User: ...\" lines, a fallback"
NO_END_TOKEN = "no end token in the model's files: replies end only at the token limit or a stop string"


def open_base(path: str | Path) -> BaseFile:
    """Read the headers of a base and check that it can run here.

    `path` is a GGUF file, a model folder, the config.json or safetensors file in one, or a Hugging Face cache entry.
    Raises FormatError (a ValueError) that names the file, what is wrong and what to do; OSError when it cannot be read.
    """
    base = _read(Path(os.path.expanduser(path)))
    notes = base.notes + (() if base.chat_template else (NO_TEMPLATE,)) + (() if base.end_tokens else (NO_END_TOKEN,))
    return replace(base, notes=notes)


def _read(path: Path) -> BaseFile:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; give the path of a GGUF file or of a Hugging Face model folder")
    if path.is_dir() and is_cache_entry(path):
        return _read(snapshot_of(path))
    if path.is_dir():
        return read_folder_base(path)
    if path.name in ("config.json", SINGLE, INDEX):
        return read_folder_base(path.parent)
    if path.name.startswith("adapter_"):
        raise FormatError(f"{path}: is a LoRA adapter, not a base model; open a base first and add this file as an adapter")
    if path.suffix.lower() not in (".gguf", ".ggml", "") and not _says_gguf(path):
        raise FormatError(f"{path}: is not a model (not a GGUF file, and no part of a Hugging Face folder that is opened by itself); "
                          "give a GGUF file or the folder that holds config.json")
    return read_gguf_base(path)


def _says_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file or one of the older GGML kinds, which its reader tells apart."""
    with open_regular(path) as stream:
        return b"GG" in stream.read(4).upper()

"""The header of safetensors files, alone or as the shards of a folder. Bounded, no torch."""
from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .entry import BLOCKS, MAX_TENSORS, TensorEntry
from .files import FormatError, open_regular, parse_json_object, present, read_json_object, show
from .gguf import refuse_overlap

MAX_HEADER_BYTES = 100_000_000
"""the format's own limit"""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class SafetensorsHeader:
    """`metadata` is the untrusted `__metadata__` of the file, text to text."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    file_bytes: int


def read_header(path: Path) -> SafetensorsHeader:
    """Names, types, shapes and places of the tensors of one file. Types of the format are kept by its own names.

    Raises FormatError for a file that is none or contradicts itself, OSError when it cannot be read.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        length = _header_length(start + stream.read(16), size, path)
        stream.seek(8)
        raw = parse_json_object(stream.read(length), path)
    metadata = raw.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        metadata = {}
    if len(raw) > MAX_TENSORS:
        raise FormatError(f"{path}: lists {len(raw):,} tensors, more than the {MAX_TENSORS:,} that are read; the file is corrupt")
    tensors = {name: _entry(name, spec, path, 8 + length, size) for name, spec in raw.items()}
    refuse_overlap(tensors, path)
    return SafetensorsHeader(path, {str(k): str(v) for k, v in metadata.items()}, tensors, size)


def read_folder(folder: Path) -> SafetensorsHeader:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names, as one header.

    The files may be links, as in a Hugging Face cache; the index may name files of the folder alone. Raises FormatError naming the
    shard that is missing or a tensor that is not where the index says.
    """
    index_path = folder / INDEX
    if present(folder / SINGLE):
        return read_header(folder / SINGLE)
    if not present(index_path):
        pickled = next((name for name in PICKLED if present(folder / name)), None)
        advice = (f"its {pickled} is a pickle, which may run code and is not read: save the model again with transformers "
                  "(from_pretrained, save_pretrained) or use a GGUF of it") if pickled else "a folder of safetensors weights is expected"
        raise FormatError(f"{folder}: holds neither {SINGLE} nor {INDEX}; {advice}")
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError(f"{index_path}: has no weight_map from tensor names to shard files; download it again")
    tensors: dict[str, TensorEntry] = {}
    total = 0
    for file in sorted(set(weight_map.values())):
        shard = _read_shard(folder, file, index_path)
        total += shard.file_bytes
        for name, entry in shard.tensors.items():
            if name in tensors:
                raise FormatError(f"{shard.path}: tensor {show(name)} is also in {tensors[name].file.name}; download the shards again")
            tensors[name] = entry
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise FormatError(f"{folder / file}: does not hold tensor {show(name)}, though {INDEX} says so; download the shards again")
    return SafetensorsHeader(index_path, {}, tensors, total)


def _read_shard(folder: Path, file: str, index_path: Path) -> SafetensorsHeader:
    if Path(file).name != file or file in ("", ".", "..") or len(file) > 200 or not file.isprintable():
        raise FormatError(f"{index_path}: names the shard {show(file)}, which is not a file name inside the folder")
    if not present(folder / file):
        raise FormatError(f"{folder / file}: shard is missing, though {INDEX} names it; download it into the folder")
    return read_header(folder / file)


def _header_length(start: bytes, size: int, path: Path) -> int:
    if start.startswith(b"version https://git-lfs"[:24]):
        raise FormatError(f"{path}: is a Git LFS pointer, not the weights; fetch them with `git lfs pull` or download the file again")
    if start.startswith(b"GGUF"):
        raise FormatError(f"{path}: is a GGUF file, not safetensors; give it the ending .gguf and open it as a file")
    if size < 8:
        raise FormatError(f"{path}: holds {size} bytes and no safetensors header; the download is incomplete, fetch it again")
    length = int.from_bytes(start[:8], "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise FormatError(f"{path}: states a header of {length:,} bytes in a file of {size:,}; it is truncated, corrupt or not "
                          "safetensors, download it again")
    return length


def _entry(name: str, spec: Any, path: Path, data_start: int, size: int) -> TensorEntry:
    if not isinstance(spec, dict):
        raise FormatError(f"{path}: tensor {show(name)} has no description in the header; the file is corrupt")
    kind, shape, place = spec.get("dtype"), spec.get("shape"), spec.get("data_offsets")
    if not isinstance(kind, str) or kind not in BLOCKS or BLOCKS[kind][0] != 1:
        raise FormatError(f"{path}: tensor {show(name)} has the unknown dtype {show(kind)}")
    if not _naturals(shape) or not _naturals(place) or len(place) != 2:
        raise FormatError(f"{path}: tensor {show(name)} has no valid shape and data_offsets in the header; the file is corrupt")
    begin, end = place
    if not begin <= end or data_start + end > size:
        raise FormatError(f"{path}: is truncated: tensor {show(name)} ends at byte {data_start + end:,} of a file of {size:,}; "
                          "download it again")
    nbytes = math.prod(shape) * BLOCKS[kind][1]
    if nbytes != end - begin:
        raise FormatError(f"{path}: tensor {show(name)} of shape {shape} and dtype {kind} takes {nbytes:,} bytes, its data_offsets give "
                          f"{end - begin:,}; the file is corrupt")
    return TensorEntry(name, kind, tuple(shape), path, data_start + begin, nbytes)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(item) is int and 0 <= item < 1 << 63 for item in value)

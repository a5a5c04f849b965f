"""Bytes of a base's tensors -> torch tensors on a device, a chunk at a time."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ...kernels.quant import QUANT_TYPES, dequantize
from ..base_parts import BaseFile
from .entry import TensorEntry
from .files import FormatError, open_regular

CHUNK_BYTES = 1 << 20
"""read at once: small enough for a prompt cancel"""
SERIAL_ELEMENTS = 32_000
"""converted at once on the CPU: below torch's 32,768, from which an operation is shared by threads. Threads that wait for each other
at every operation make loading several times slower on a busy machine, and hardly faster on an idle one."""

Progress = Callable[[str, int, int], None]


class LoadCancelled(Exception):
    """`cancelled()` turned true while weights were read."""


def load_weights(
    base: BaseFile, device: torch.device | str, dtype: torch.dtype,
    progress: Progress = lambda name, done, total: None, cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor]:
    """Every tensor of `base` by canonical name, contiguous, of `dtype` on `device`; q/k rows in Hugging Face order.

    `rope_freqs.weight` stays float32. `progress` gets the tensor's name, bytes done and bytes in all, about
    once a megabyte; `cancelled` is asked as often. Takes the memory of the result and of one tensor more.
    Raises LoadCancelled; FormatError when the file changed since it was opened; OSError.
    """
    total = sum(entry.nbytes for entry in base.tensors.values())
    done = 0
    result: dict[str, Tensor] = {}
    streams: dict[Path, BinaryIO] = {}

    def advance(name: str, count: int) -> None:
        nonlocal done
        done += count
        progress(name, done, total)
        if cancelled():
            raise LoadCancelled(f"{base.path}: loading was cancelled")

    try:
        for name, entry in sorted(base.tensors.items(), key=lambda item: (str(item[1].file), item[1].offset)):
            if entry.file not in streams:
                streams[entry.file] = open_regular(entry.file)
            wanted = torch.float32 if name == "rope_freqs.weight" else dtype
            tensor = _read(entry, streams[entry.file], torch.device(device), wanted, lambda count, name=name: advance(name, count))
            result[name] = _hugging_face_rows(name, tensor, base)
    finally:
        for stream in streams.values():
            stream.close()
    return result


def _read(entry: TensorEntry, stream: BinaryIO, device: torch.device, dtype: torch.dtype, advance: Callable[[int], None]) -> Tensor:
    if os.fstat(stream.fileno()).st_size < entry.offset + entry.nbytes:
        raise _changed(entry)
    kind = QUANT_TYPES[entry.type]
    flat = torch.empty(entry.elements, dtype=dtype, device=device)
    step = CHUNK_BYTES // kind.block_bytes
    blocks = entry.nbytes // kind.block_bytes
    buffer = torch.empty(min(step, blocks) * kind.block_bytes, dtype=torch.uint8)
    stream.seek(entry.offset)
    for first in range(0, blocks, step):
        count = min(step, blocks - first)
        data = buffer[:count * kind.block_bytes]
        if stream.readinto(memoryview(data.numpy())) != data.numel():
            raise _changed(entry)
        _convert(data.to(device), entry.type, flat[first * kind.block_elements:(first + count) * kind.block_elements])
        advance(data.numel())
    return flat.view(entry.shape)


def _convert(data: Tensor, type_name: str, out: Tensor) -> None:
    """Dequantise `data` into `out`, a piece at a time on the CPU."""
    kind = QUANT_TYPES[type_name]
    blocks = max(1, SERIAL_ELEMENTS // kind.block_elements if data.device.type == "cpu" else data.numel())
    pieces, places = data.split(blocks * kind.block_bytes), out.split(blocks * kind.block_elements)
    for piece, place in zip(pieces, places, strict=True):
        place.copy_(dequantize(piece, type_name))


def _changed(entry: TensorEntry) -> FormatError:
    return FormatError(f"{entry.file}: got shorter while tensor {entry.name} was read; let what writes to it finish and load it again")


def _hugging_face_rows(name: str, tensor: Tensor, base: BaseFile) -> Tensor:
    """GGUF stores the two halves of each q/k head interleaved; the halves' order is Hugging Face's."""
    module = name.rpartition(".")[0]
    if base.format != "gguf" or not module.endswith((".q_proj", ".k_proj")):
        return tensor
    heads = base.facts.heads if module.endswith(".q_proj") else base.facts.kv_heads
    return tensor.view(heads, base.facts.head_dim // 2, 2, -1).transpose(1, 2).reshape(tensor.shape).contiguous()

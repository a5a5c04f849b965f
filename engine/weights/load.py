"""Bytes of a base's tensors -> torch tensors on a device, a chunk at a time."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import isnan
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ...kernels.packed import PackedRows, PackedWeight, convert_
from ...kernels.quant import QUANT_TYPES, dequantize, largest, swap_byte_order_
from ...kernels.weights import Weight
from ..base_parts import BaseFile
from ..models.names import permuted_heads
from .entry import TensorEntry
from .files import FormatError, open_regular, show
from .memory import stays_packed

CHUNK_BYTES = 1 << 20
"""read at once: small enough for a prompt cancel"""

Progress = Callable[[str, int, int], None]


class LoadCancelled(Exception):
    """`cancelled()` turned true while weights were read."""


def load_weights(
    base: BaseFile, device: torch.device | str, dtype: torch.dtype,
    progress: Progress = lambda name, done, total: None, cancelled: Callable[[], bool] = lambda: False, packed: bool = False,
    recoded: bool = False,
) -> dict[str, Weight]:
    """Every tensor of `base` by canonical name, of `dtype` on `device`, contiguous; q/k rows in Hugging Face order.

    With `packed`, matrices that are smaller as they are in the file stay so (PackedWeight); with `recoded` too, a CPU is to bring them
    into the order of its own products. Factors of RoPE are float32, and so are norms of models whose files lack an offset of them
    (facts.norm_offset), which is added.
    `progress` gets the tensor's name, bytes done and bytes in all, about once a megabyte; `cancelled` is asked as often. Takes the
    memory of the result and of one tensor more. Raises LoadCancelled; FormatError when the file changed since it was opened, and for a
    number that is not finite in the dtype (attention on the CPU would hide it in finite, wrong logits); OSError.
    """
    total = sum(entry.nbytes for entry in base.tensors.values())
    done = 0
    result: dict[str, Weight] = {}
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
            kept = torch.float32 if _kept_wide(name, base) else dtype
            pieces = _read(entry, streams[entry.file], kept, lambda count, name=name: advance(name, count))
            if packed and stays_packed(entry, dtype.itemsize):
                data = _gather_bytes(entry, pieces, torch.device(device))
                result[name] = PackedWeight((PackedRows(entry.type, _hugging_face_rows(name, data, base)),), dtype, recoded)
            else:
                tensor = _gather_numbers(entry, pieces, torch.device(device), kept)
                result[name] = _whole_norm(name, _hugging_face_rows(name, tensor, base), base)
    finally:
        for stream in streams.values():
            stream.close()
    return result


def _read(entry: TensorEntry, stream: BinaryIO, dtype: torch.dtype, advance: Callable[[int], None]) -> Iterator[Tensor]:
    """The bytes of a tensor whose numbers are finite in `dtype`, little endian, in whole blocks; each piece is overwritten by the next."""
    if os.fstat(stream.fileno()).st_size < entry.offset + entry.nbytes:
        raise _changed(entry)
    block_bytes = QUANT_TYPES[entry.type].block_bytes
    step = CHUNK_BYTES // block_bytes * block_bytes
    buffer = torch.empty(min(step, entry.nbytes), dtype=torch.uint8)
    stream.seek(entry.offset)
    for first in range(0, entry.nbytes, step):
        data = buffer[:min(step, entry.nbytes - first)]
        if stream.readinto(memoryview(data.numpy())) != data.numel():
            raise _changed(entry)
        if entry.big_endian:
            swap_byte_order_(data, entry.type)
        _check_finite(data, entry, dtype)
        yield data
        advance(data.numel())


def _gather_numbers(entry: TensorEntry, pieces: Iterator[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    kind = QUANT_TYPES[entry.type]
    flat = torch.empty(entry.elements, dtype=dtype, device=device)
    first = 0
    for data in pieces:
        count = data.numel() // kind.block_bytes * kind.block_elements
        convert_(data.to(device), entry.type, flat[first:first + count])
        first += count
    return flat.view(entry.shape)


def _gather_bytes(entry: TensorEntry, pieces: Iterator[Tensor], device: torch.device) -> Tensor:
    """uint8 [rows, bytes of a row]"""
    flat = torch.empty(entry.nbytes, dtype=torch.uint8, device=device)
    first = 0
    for data in pieces:
        flat[first:first + data.numel()].copy_(data)
        first += data.numel()
    return flat.view(entry.shape[0], -1)


def _check_finite(data: Tensor, entry: TensorEntry, dtype: torch.dtype) -> None:
    """Raises FormatError for packed bytes with a number that is not finite in `dtype`. The bound is enough for all but odd files."""
    bound = largest(data, entry.type)
    if bound <= torch.finfo(dtype).max:
        return
    numbers = dequantize(data, entry.type)
    what = f"{entry.file}: tensor {show(entry.name)} holds numbers that are"
    if isnan(bound) or not numbers.isfinite().all():
        raise FormatError(f"{what} not finite (NaN or infinity), so nothing computed with it could be right; the file is damaged, or its "
                          "training or conversion failed: get another copy of it")
    if not numbers.to(dtype).isfinite().all():
        raise FormatError(f"{what} too large for {str(dtype).removeprefix('torch.')}; load the base with --dtype fp32")


def _changed(entry: TensorEntry) -> FormatError:
    return FormatError(f"{entry.file}: got shorter while tensor {entry.name} was read; let what writes to it finish and load it again")


def _hugging_face_rows(name: str, tensor: Tensor, base: BaseFile) -> Tensor:
    """`tensor` [rows, ...], of numbers or of packed bytes, in Hugging Face order; see `permuted_heads`."""
    heads = permuted_heads(base.facts, name.rpartition(".")[0]) if base.format == "gguf" else None
    if heads is None:
        return tensor
    return tensor.view(heads, base.facts.head_dim // 2, 2, -1).transpose(1, 2).reshape(tensor.shape).contiguous()


def _kept_wide(name: str, base: BaseFile) -> bool:
    """Whether a tensor is float32 whatever the dtype of the model: factors of RoPE, and norms that are one number and a small rest."""
    return name.startswith("rope_") or base.facts.norm_offset != 0 and name.endswith("norm.weight")


def _whole_norm(name: str, tensor: Tensor, base: BaseFile) -> Tensor:
    """The weight of a norm with what Hugging Face files of some architectures leave out; other tensors as they are."""
    missing = base.facts.norm_offset if base.format == "safetensors" and name.endswith("norm.weight") else 0.0
    return tensor + missing if missing else tensor

"""The tensors of an adapter file, brought into RAM without trusting what the file says of them."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.quant import dequantize, swap_byte_order_
from ..weights.entry import TensorEntry
from ..weights.files import open_regular, show
from .adapter import LoraPair
from .errors import AdapterError
from .keys import PairNames
from .pickled import read_pickle

if TYPE_CHECKING:
    from .file import AdapterFile

CHUNK_BYTES = 4 << 20
"""read at once: small enough for a prompt cancel"""
Advance = Callable[[int], None]
"""told the bytes of every piece that was read; what it raises ends the reading"""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Names and shapes are known at once, values are read (and checked to be finite) when asked for."""

    file: AdapterFile
    shapes: Mapping[str, tuple[int, ...]]
    """as the tensors are meant: those that the file holds transposed are turned"""
    entries: Mapping[str, TensorEntry]
    """of a safetensors or GGUF file"""
    pickled: Mapping[str, Tensor]
    """of a `.bin`"""
    turned: frozenset[str]
    """names of the tensors that the file holds transposed"""
    advance: Advance

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def pair(self, names: PairNames, scaling: float) -> LoraPair:
        """The factors of one module in one dtype, contiguous; fp64 and quantised types become fp32."""
        a, b = self.tensor(names.a), self.tensor(names.b)
        if a.dtype != b.dtype:
            a, b = a.float(), b.float()
        bias = self.tensor(names.bias) if names.bias else None
        return LoraPair(a, b, scaling, bias, self.tensor(names.magnitude) if names.magnitude else None)

    def tensor(self, name: str) -> Tensor:
        """One tensor in RAM, contiguous. Raises AdapterError when it holds NaN or infinity."""
        if name in self.pickled:
            tensor = self.pickled[name].detach().clone(memory_format=torch.contiguous_format)
            self.advance(tensor.nbytes)
        else:
            tensor = _read_entry(self.entries[name], self.advance)
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"{self.file.weights_path}: tensor {show(name, 160)} has values that are not finite (NaN or infinity); "
                               "the training diverged or the file is corrupt")
        return tensor.T.contiguous() if name in self.turned else tensor


def open_tensors(file: AdapterFile, advance: Advance = lambda count: None) -> TensorSource:
    """The tensors of `file`, whose reading is told to `advance`.

    Raises AdapterError for a `.bin` with anything but plain dense tensors inside.
    """
    turned = file.names.turned if file.names is not None else frozenset()
    if file.entries is not None:
        return TensorSource(file, file.shapes, file.entries, {}, turned, advance)
    pickled = read_pickle(file.weights_path, file.weights_bytes)
    return TensorSource(file, {name: tuple(tensor.shape) for name, tensor in pickled.items()}, {}, pickled, turned, advance)


def _read_entry(entry: TensorEntry, advance: Advance) -> Tensor:
    data = bytearray(entry.nbytes)
    with open_regular(entry.file) as stream:
        stream.seek(entry.offset)
        for start in range(0, entry.nbytes, CHUNK_BYTES):
            piece = memoryview(data)[start:start + CHUNK_BYTES]
            if stream.readinto(piece) != len(piece):
                raise AdapterError(f"{entry.file}: changed while it was read; load it again when it is complete")
            advance(len(piece))
    if not data:
        return torch.empty(entry.shape)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if entry.big_endian:
        swap_byte_order_(raw, entry.type)
    return (raw.view(_DTYPES[entry.type]) if entry.type in _DTYPES else dequantize(raw, entry.type)).reshape(entry.shape)

"""A matrix whose rows stay as they lie in a file, in blocks of GGML types; they become numbers only where they are used."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .quant import QUANT_TYPES, dequantize

CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""that become numbers at once: few enough to stay in a cache of the CPU, enough to fill a GPU"""
SERIAL_ELEMENTS = 32_000
"""converted at once on the CPU: below torch's 32,768, from which an operation is shared by threads. Threads that wait for each other
at every operation make it several times slower on a busy machine, and hardly faster on an idle one."""
PLAIN_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of one type. `data`: uint8 [rows, bytes of a row], contiguous, little endian; a row is whole blocks."""

    type: str
    data: Tensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """[rows, d_in], as `parts` one under the other; `dtype` is that of the model, in which its numbers are handed out."""

    parts: tuple[PackedRows, ...]
    dtype: torch.dtype
    recoded: bool = False
    """on a CPU, its rows are to be brought into the order of the products there"""

    @property
    def shape(self) -> tuple[int, int]:
        kind = QUANT_TYPES[self.parts[0].type]
        return sum(part.data.shape[0] for part in self.parts), self.parts[0].data.shape[1] // kind.block_bytes * kind.block_elements

    @property
    def device(self) -> torch.device:
        return self.parts[0].data.device

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)

    def chunks(self, dtype: torch.dtype, elements: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, [n, d_in] of `dtype`) over all rows, about `elements` numbers at a time; each a copy."""
        first, d_in = 0, self.shape[1]
        for part in self.parts:
            for data in part.data.split(max(1, elements // d_in)):
                yield first, _numbers(data, part.type, dtype)
                first += data.shape[0]

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Semantics: y[t, o] = sum_i x[t, i] weight[o, i] + bias[o].  x [T, d_in], y [T, rows], in the dtype of x."""
        y = x.new_empty((x.shape[0], self.shape[0]))
        for first, weight in self.chunks(x.dtype, CHUNK_ELEMENTS[x.device.type]):
            y[:, first:first + weight.shape[0]] = x @ weight.t()
        return y if bias is None else y.add_(bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Semantics: y[t] = weight[ids[t]].  ids [T] int64; y [T, d_in] in `dtype`."""
        picked, first = None, 0
        for part in self.parts:
            count = part.data.shape[0]
            found = _numbers(part.data.index_select(0, (ids - first).clamp(0, count - 1)), part.type, self.dtype)
            picked = found if picked is None else torch.where((ids >= first).unsqueeze(1), found, picked)
            first += count
        return picked


def packed_concat(weights: list[Tensor | PackedWeight]) -> PackedWeight:
    """The weights one under the other, without a copy; plain ones become rows of their own number format."""
    return PackedWeight(tuple(part for weight in weights for part in _parts(weight)), weights[0].dtype,
                        any(isinstance(weight, PackedWeight) and weight.recoded for weight in weights))


def convert_(data: Tensor, type_name: str, out: Tensor) -> None:
    """Packed bytes, uint8 [n * block_bytes], into `out` [n * block_elements] of any float dtype, a piece at a time on the CPU."""
    kind = QUANT_TYPES[type_name]
    blocks = max(1, SERIAL_ELEMENTS // kind.block_elements if data.device.type == "cpu" else data.numel())
    pieces, places = data.split(blocks * kind.block_bytes), out.split(blocks * kind.block_elements)
    for piece, place in zip(pieces, places, strict=True):
        place.copy_(dequantize(piece, type_name))


def _numbers(data: Tensor, type_name: str, dtype: torch.dtype) -> Tensor:
    kind = QUANT_TYPES[type_name]
    out = torch.empty((data.shape[0], data.shape[1] // kind.block_bytes * kind.block_elements), dtype=dtype, device=data.device)
    convert_(data.reshape(-1), type_name, out.view(-1))
    return out


def _parts(weight: Tensor | PackedWeight) -> tuple[PackedRows, ...]:
    if isinstance(weight, PackedWeight):
        return weight.parts
    return (PackedRows(PLAIN_TYPES[weight.dtype], weight.contiguous().view(torch.uint8)),)

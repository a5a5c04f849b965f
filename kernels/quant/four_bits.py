"""Types of four bits and one scale for every 32 elements, as codes with a scale and an offset: a number is scale * code + offset."""
from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .fields import half_at, unpack
from .super_blocks import six_bit_pairs

GROUP = 32
Coded = tuple[Tensor, Tensor, Tensor]
"""codes uint8 [blocks, block_elements], scales and offsets float32 [blocks, block_elements / GROUP]"""


def _q4_0(blocks: Tensor) -> Coded:
    scales = half_at(blocks, 0)
    return unpack(blocks[:, 2:], 4, 16).flatten(1), scales, -8 * scales


def _q4_1(blocks: Tensor) -> Coded:
    return unpack(blocks[:, 4:], 4, 16).flatten(1), half_at(blocks, 0), half_at(blocks, 2)


def _q4_k(blocks: Tensor) -> Coded:
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    return unpack(blocks[:, 16:], 4, 32).flatten(1), scales * half_at(blocks, 0), -minima * half_at(blocks, 2)


FOUR_BITS: dict[str, Callable[[Tensor], Coded]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
"""uint8 [blocks, block_bytes], contiguous and little endian -> Coded"""


def coded_rows(data: Tensor, type_name: str, block_bytes: int) -> Coded:
    """Rows of blocks, uint8 [rows, bytes of a row]: codes [rows, d_in], scales and offsets [rows, d_in / GROUP]."""
    rows = data.shape[0]
    codes, scales, offsets = FOUR_BITS[type_name](data.reshape(-1, block_bytes))
    return codes.view(rows, -1), scales.reshape(rows, -1), offsets.reshape(rows, -1)

"""How many bytes of memory weights take, dense or packed, from their headers. No torch."""
from __future__ import annotations

from collections.abc import Iterable

from .entry import TensorEntry

DENSE_SHARE = 0.75
"""of the memory that is free, what dense weights may take before packed ones are chosen unasked: keys, values and adapters need the rest"""


def stays_packed(entry: TensorEntry, itemsize: int) -> bool:
    """Whether a packed load keeps this tensor as it is in the file: a matrix that is smaller so than at `itemsize` bytes a number."""
    return len(entry.shape) == 2 and entry.nbytes < entry.elements * itemsize


def weight_bytes(entries: Iterable[TensorEntry], itemsize: int, packed: bool) -> int:
    """Bytes of the tensors in memory where a number of the model takes `itemsize`."""
    return sum(entry.nbytes if packed and stays_packed(entry, itemsize) else entry.elements * itemsize for entry in entries)

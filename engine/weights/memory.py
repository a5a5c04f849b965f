"""How many bytes of memory weights take, dense or packed, from their headers. No torch."""
from __future__ import annotations

import platform
from collections.abc import Iterable

from .entry import TensorEntry

DENSE_SHARE = 0.75
"""of the memory that is free, what dense weights may take before packed ones are chosen unasked: keys, values and adapters need the rest"""

CPU_BITS = {"Q4_0": 5.0, "Q4_1": 5.0, "Q4_K": 5.0, "Q5_0": 8.5, "Q5_1": 9.0, "Q5_K": 9.0, "Q6_K": 9.0, "Q8_0": 8.5}
"""of a number of the types that a CPU's products of packed numbers take, as they take them"""
CPU_MACHINES = ("x86_64", "AMD64")
"""whose processors may have such products"""
CPU_SHARE = 0.5
"""of the numbers of a base, that must be of those types for them to be chosen unasked"""


def mostly_for_cpu(entries: Iterable[TensorEntry]) -> bool:
    """Whether a CPU's products of packed numbers suit these tensors of a base and the machine."""
    sizes = [(entry.type in CPU_BITS, entry.elements) for entry in entries]
    taken, total = sum(size for known, size in sizes if known), sum(size for _, size in sizes)
    return platform.machine() in CPU_MACHINES and taken > CPU_SHARE * total


def stays_packed(entry: TensorEntry, itemsize: int) -> bool:
    """Whether a packed load keeps this tensor as it is in the file: a matrix that is smaller so than at `itemsize` bytes a number."""
    return len(entry.shape) == 2 and entry.nbytes < entry.elements * itemsize


def weight_bytes(entries: Iterable[TensorEntry], itemsize: int, packed: bool, for_cpu: bool = False) -> int:
    """Bytes of the tensors in memory where a number of the model takes `itemsize`; `for_cpu`: those that are packed, as a CPU's products
    of packed numbers take them."""
    if packed and for_cpu:
        return sum(int(entry.elements * CPU_BITS[entry.type]) // 8 if len(entry.shape) == 2 and entry.type in CPU_BITS else
                   weight_bytes((entry,), itemsize, packed) for entry in entries)
    return sum(entry.nbytes if packed and stays_packed(entry, itemsize) else entry.elements * itemsize for entry in entries)

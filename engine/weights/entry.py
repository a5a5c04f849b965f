"""Where a tensor lies in a file, and the tensor types there are. No torch."""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "F64": (1, 8),
    "I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8), "U8": (1, 1), "U16": (1, 2), "U32": (1, 4), "U64": (1, 8),
    "BOOL": (1, 1), "F8_E4M3": (1, 1), "F8_E5M2": (1, 1),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 36),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98), "IQ1_S": (256, 50), "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110), "IQ2_S": (256, 82), "IQ4_XS": (256, 136), "IQ1_M": (256, 56),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36), "Q1_0": (128, 18),
}
"""tensor type -> (elements of a block, bytes of a block); plain types are blocks of one"""

MAX_TENSORS = 1 << 17
"""in one file; the models with most, of many experts kept apart, have 90,000 in all their files"""

READABLE = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
})
"""the types that weights may have: those `kernels.quant` turns into numbers"""
READABLE_TEXT = (", ".join(sorted(kind for kind in READABLE if BLOCKS[kind][0] == 1)) + ", or in a GGUF of "
                 + ", ".join(sorted(kind for kind in READABLE if BLOCKS[kind][0] > 1)))
"""for messages"""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file. `shape` in torch order (rows first); `offset` counts from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    big_endian: bool = False
    """numbers of several bytes lie in the file with the highest first, inside of blocks too"""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

"""Triton where it is installed; without it every module still imports, and the plain torch reference of each op is used."""
from __future__ import annotations

import os
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    class _Absent:
        """Enough of a name for the decorators and annotations of kernels that will not run."""

        constexpr = object

        def jit(self, function: Any = None, **options: Any) -> Any:
            return function if function is not None else self.jit

    triton = tl = _Absent()  # type: ignore[assignment]
    HAS_TRITON = False
else:
    HAS_TRITON = True

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""kernels run on the CPU, slowly: for tests"""


def runs_triton(x: Tensor) -> bool:
    """Whether kernels can take tensors like `x`."""
    return HAS_TRITON and (x.is_cuda or INTERPRETED)

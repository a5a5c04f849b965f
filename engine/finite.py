"""Numbers of an adapter that the dtype of its base must hold."""
from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .adapters.errors import AdapterError

if TYPE_CHECKING:
    from .adapters.adapter import Adapter


def check_finite(tensor: Tensor, adapter: Adapter, what: str) -> Tensor:
    """`tensor`, a part of `adapter` in the dtype of its base; `what` says which, in the plural. Raises AdapterError."""
    if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
        raise AdapterError(f"{adapter.info.path}: {what} are too large for {str(tensor.dtype).removeprefix('torch.')}; "
                           "load the base with --dtype fp32 or lower lora_alpha")
    return tensor

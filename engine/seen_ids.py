"""Which ids a request holds, for the penalty on repetition."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SeenIds:
    """A mask over a vocabulary that takes up every token of a request once."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None
        self._taken = 0

    def mask(self, ids: Sequence[int], size: int, device: torch.device) -> Tensor:
        """[size] bool, true for what is among `ids`, to which tokens are only ever added. Of another `size` it is made anew."""
        if self._mask is None or self._mask.shape[0] != size:
            self._mask, self._taken = torch.zeros(size, dtype=torch.bool, device=device), 0
        if new := [number for number in ids[self._taken :] if number < size]:
            self._mask[torch.tensor(new, device=device)] = True
        self._taken = len(ids)
        return self._mask

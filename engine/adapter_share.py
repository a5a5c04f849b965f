"""What adapters add to a decode step, whose kernels compute them with the base: told by running the step without them now and then."""
from __future__ import annotations

import numpy as np

EVERY = 128
"""steps between two such looks, each of which takes the time of a step: under 1 % of all"""
STEADY = 8
"""steps with the same adapters before one"""


class AdapterShare:
    """Counts steps, and keeps for each op the share of its time that the base alone took when that was measured last."""

    def __init__(self, ops: int) -> None:
        self._of_base = np.ones(ops)
        self._since, self._steady = EVERY, 0
        self._key: object = None

    def due(self, key: object) -> bool:
        """A step begins; `key` names its adapters and rows. Whether it should be run without adapters before."""
        self._since += 1
        self._steady = self._steady + 1 if key == self._key else 0
        self._key = key
        if self._since < EVERY or self._steady < STEADY:
            return False
        self._since = 0
        return True

    def postpone(self) -> None:
        """The next step is not one to be run without adapters."""
        self._since = min(self._since, EVERY - 2)

    def measured(self, base: np.ndarray, whole: np.ndarray) -> None:
        """[ops] milliseconds of one step without and with its adapters."""
        self._of_base = np.divide(base, whole, out=np.ones_like(base), where=whole > 0).clip(0.0, 1.0)

    def split(self, whole: np.ndarray) -> tuple[np.ndarray, float]:
        """([ops] milliseconds of the base, those that adapters added) of a step with adapters."""
        base = whole * self._of_base
        return base, float((whole - base).sum())

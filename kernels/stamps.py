"""When the ops of a step began, written by the device itself: a captured step tells its times without events and without a wait."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
import numpy as np
from torch import Tensor

from .triton_compat import HAS_TRITON, tl, triton

Stamp = tuple[Tensor, int]
"""int64 nanoseconds of the device's clock, and the place that a kernel writes when its program 0 begins"""


class Stamps:
    """The places of a step's stamps in the order in which its ops run; every pass over the step asks for the same ones.

    An op lasts until the next stamp, so the parts sum to the whole between the first and the last.
    """

    def __init__(self, times: Tensor) -> None:
        """`times`: [places] int64 on the device; on a CPU, and without Triton, nothing is timed."""
        self._times = times if times.is_cuda and HAS_TRITON else None
        self._ops: list[str] = []
        self._next = 0
        self._lasting: dict[tuple[str, ...], np.ndarray] = {}

    @property
    def live(self) -> bool:
        """Whether anything is timed."""
        return self._times is not None

    def begin(self) -> None:
        """A pass over the step begins."""
        self._next = 0

    def at(self, op: str) -> Stamp | None:
        """For the kernel with which `op` begins."""
        if self._times is None:
            return None
        if self._next == len(self._ops):
            self._ops.append(op)
        self._next += 1
        return self._times, self._next - 1

    def mark(self, op: str) -> None:
        """`op` begins here, with something that cannot write a stamp: a kernel of one program does."""
        if (stamp := self.at(op)) is not None:
            _write[(1,)](stamp[0], stamp[1], num_warps=1)

    def sums(self, times: np.ndarray, ops: tuple[str, ...]) -> np.ndarray:
        """Milliseconds of each of `ops` [ops] float64, from the stamps of one step [places] int64. The last stamp only ends an op."""
        if not self._ops:
            return np.zeros(len(ops))
        if ops not in self._lasting:
            self._lasting[ops] = _lasting(self._ops, ops)
        return (times[: len(self._ops)] - times[0]) @ self._lasting[ops]


def _lasting(places: list[str], ops: tuple[str, ...]) -> np.ndarray:
    """[places, ops]: what the stamps are multiplied with for milliseconds by op."""
    signs = np.zeros((len(places), len(ops)))
    for place, op in enumerate(places[:-1]):
        signs[place, ops.index(op)] -= 1e-6
        signs[place + 1, ops.index(op)] += 1e-6
    return signs


@triton.jit
def _write(times, place):
    tl.store(times + place, tl.extra.cuda.globaltimer())

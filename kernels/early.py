"""Launches whose programs come while the launch before still ends (programmatic dependent launch, compute capability 9.0).

What such a program does before `begin` must not read what the launch before writes; it may read what stood there before that one began.
A launch lets the next one come late, when its programs have made their products: the programs of the next go wherever there is room, so
while most of this one's still run they would crowd on the few multiprocessors that are free, and the slowest of these sets the time.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from functools import cache

import torch

from .triton_compat import HAS_TRITON, INTERPRETED, tl, triton


@cache
def begins_early() -> bool:
    """Whether the GPU and Triton can do so."""
    return (HAS_TRITON and not INTERPRETED and hasattr(tl.extra.cuda, "gdc_wait") and torch.cuda.is_available()
            and torch.cuda.get_device_capability()[0] >= 9)


def early_launch() -> dict[str, bool]:
    """Options of such a launch."""
    return {"EARLY": begins_early()} | ({"launch_pdl": True} if begins_early() else {})


@triton.jit
def begin(stamp, program, EARLY: tl.constexpr):
    """Return when the launch before is done; program 0 puts the device's clock into `stamp` then, where it is given."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if stamp is not None:
        if program == 0:
            tl.store(stamp, tl.extra.cuda.globaltimer())


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The programs of the next launch may come when all of this one's have said so or are done."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at):
    """Bring the lines of 128 bytes at the pointers `at` into the L2 cache."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)

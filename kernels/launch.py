"""Launches of kernels whose compiled form is known: a prompt's step has hundreds of them, and Triton looks at every argument each time."""
from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from .triton_compat import INTERPRETED

_compiled: dict[tuple[Any, Hashable], Any] = {}


def launch(
    kernel: Any, form: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: Mapping[str, Any],
    stream: torch.cuda.Stream | None = None, **options: int | None,
) -> None:
    """kernel[grid](*arguments, **constants, **options), on `stream` where one is given.

    `form` tells all that it is compiled for beside `constants` and `options`: the device, dtypes and alignment of tensors, and the integers
    that Triton specializes on, as far as they are not always the same. `constants` are the kernel's last parameters, in their order.
    """
    key = kernel.fn, form, *constants.values(), *options.values()
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants.values(), stream=None if stream is None else stream.cuda_stream)
        return
    if stream is None:
        compiled = kernel[grid](*arguments, **constants, **options)
    else:
        with torch.cuda.stream(stream):
            compiled = kernel[grid](*arguments, **constants, **options)
    if not INTERPRETED:
        _compiled[key] = compiled

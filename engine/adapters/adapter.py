"""An adapter in memory: pairs of low-rank factors by module, and what is known of it."""
from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from ..protocol import AdapterInfo


@dataclass(frozen=True, slots=True)
class LoraPair:
    """y += user scale * scaling * (x a^T) b^T; a [r, d_in] and b [d_out, r] of one dtype, in RAM."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True)
class Adapter:
    """`modules` by canonical name (`layers.3.self_attn.q_proj`, `lm_head`), sorted."""

    info: AdapterInfo
    modules: Mapping[str, LoraPair]


def content_digest(modules: Mapping[str, LoraPair], invocation: tuple[int, ...]) -> str:
    """Hex sha256 of what the adapter does: modules, factors, scalings, invocation. Names, paths and file layout do not count."""
    total = hashlib.sha256()
    for name in sorted(modules):
        pair = modules[name]
        head = f"{name} {pair.a.dtype} {tuple(pair.a.shape)} {tuple(pair.b.shape)} {pair.scaling.hex()}\n"
        total.update(head.encode())
        for factor in (pair.a, pair.b):
            total.update(factor.contiguous().view(torch.uint8).numpy())
    total.update(repr(invocation).encode())
    return total.hexdigest()


def layer_norms(modules: Mapping[str, LoraPair], layers: int) -> tuple[float, ...]:
    """sqrt of the sum over a layer's modules of ||scaling B A||_F^2, by layer; computed in fp32 from r x r products.

    ||B A||_F^2 is the sum of the elements of (B^T B) * (A A^T). lm_head belongs to no layer and is left out.
    """
    squares = [0.0] * layers
    for name, pair in modules.items():
        if not name.startswith("layers."):
            continue
        a, b = pair.a.float(), pair.b.float()
        gram = (b.T @ b).mul_(a @ a.T).sum().item()
        squares[int(name.split(".")[1])] += pair.scaling * pair.scaling * max(gram, 0.0)
    return tuple(sqrt(square) for square in squares)


def target_counts(modules: Mapping[str, LoraPair]) -> dict[str, int]:
    """Module kind (`q_proj`) -> how many layers have it."""
    return dict(Counter(name.rsplit(".", 1)[-1] for name in modules))

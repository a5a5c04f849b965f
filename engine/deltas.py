"""How far an adapter moves the weights of its base: Frobenius norms of the change, beside those of what it changes."""
from __future__ import annotations

from collections.abc import Generator, Iterator
from math import sqrt

import torch
from torch import Tensor

from ..kernels.weights import row_chunks
from .adapters.adapter import Adapter, LoraPair
from .models.decoder import Decoder
from .protocol import DeltaNorm

Squares = tuple[float, float]
"""of the change and of the weights"""


class BaseSquares:
    """||W||_F^2 of the modules of one base, each computed once."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._known: dict[str, float] = {}

    def __getitem__(self, module: str) -> float:
        if module not in self._known:
            self._known[module] = sum(chunk.square().sum(dtype=torch.float64).item() for _, chunk in self.rows(module))
        return self._known[module]

    def rows(self, module: str) -> Iterator[tuple[int, Tensor]]:
        """(row of the module, fp32 [n, d_in]) over the weight of a module."""
        weight, first, end = self.decoder.rows_of(module)
        for start, chunk in row_chunks(weight):
            low, high = max(first, start), min(end, start + chunk.shape[0])
            if low < high:
                yield low - first, chunk[low - start:high - start]


def delta_norms(base: BaseSquares, adapter: Adapter) -> Generator[str, None, tuple[DeltaNorm, ...]]:
    """The norms at scale 1, by layer, then of all else that the adapter changes. A text is yielded before each part of the work."""
    by_place: dict[str, Squares] = {}
    for module, pair in sorted(adapter.modules.items(), key=lambda item: _order(item[0])):
        place = f"layer {module.split('.')[1]}" if module.startswith("layers.") else module
        yield f"measures {place}"
        _add(by_place, place, _pair_squares(base, module, pair))
    weights = adapter.weights
    if weights.embedding is not None:
        yield "measures embed_tokens"
        _add(by_place, "embed_tokens", (low_rank_square(weights.embedding), base["embed_tokens"]))
    return tuple(DeltaNorm(place, sqrt(delta), sqrt(weight)) for place, (delta, weight) in by_place.items())


def _order(module: str) -> tuple[float, str]:
    """Layers by number, then what belongs to none."""
    return float(module.split(".")[1]) if module.startswith("layers.") else float("inf"), module


def low_rank_square(pair: LoraPair) -> float:
    """||scaling B A||_F^2 = scaling^2 times the sum of the elements of (B^T B) * (A A^T); fp32 products, summed in fp64."""
    a, b = pair.a.float(), pair.b.float()
    return pair.scaling * pair.scaling * max((b.T @ b).mul_(a @ a.T).sum(dtype=torch.float64).item(), 0.0)


def _pair_squares(base: BaseSquares, module: str, pair: LoraPair) -> Squares:
    if pair.magnitude is None:
        return low_rank_square(pair), base[module]
    return _dora_squares(base, module, pair)


def _dora_squares(base: BaseSquares, module: str, pair: LoraPair) -> Squares:
    """||m V / |V| - W||_F^2 with V = W + scaling B A, rows brought to the lengths m (arXiv 2402.09353, section 4)."""
    delta = weight = 0.0
    for first, rows in base.rows(module):
        here = slice(first, first + rows.shape[0])
        moved = rows + pair.scaling * (pair.b[here].float().to(rows.device) @ pair.a.float().to(rows.device))
        lengths = torch.linalg.vector_norm(moved, dim=1).clamp_min_(1e-30)
        moved *= (pair.magnitude[here].float().to(rows.device) / lengths).unsqueeze(1)
        delta += (moved - rows).square().sum(dtype=torch.float64).item()
        weight += rows.square().sum(dtype=torch.float64).item()
    return delta, weight


def _add(by_place: dict[str, Squares], place: str, squares: Squares) -> None:
    delta, weight = by_place.get(place, (0.0, 0.0))
    by_place[place] = delta + squares[0], weight + squares[1]

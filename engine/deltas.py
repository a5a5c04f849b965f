"""How far an adapter moves the weights of its base: Frobenius norms of the change, beside those of what it changes."""
from __future__ import annotations

from collections.abc import Generator, Iterator
from math import sqrt

import torch
from torch import Tensor

from ..kernels.weights import row_chunks
from ..kernels.weights import rows as rows_of_weight
from .adapters.adapter import Adapter, LoraPair, TokenRows, low_rank_square
from .models.decoder import Decoder
from .protocol import DeltaNorm

_TINY = 1e-30
"""in the place of a length of 0"""
Squares = tuple[float, float]
"""of the change and of the weights"""


class WeightSquares:
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


VECTORS = "norms and biases"
"""the place of all vectors: beside the matrices of their layer they would not be seen"""


def delta_norms(base: WeightSquares, adapter: Adapter) -> Generator[str, None, tuple[DeltaNorm, ...]]:
    """The norms at scale 1, by layer, then of all else that the adapter changes. A text is yielded before each part of the work.

    Rows that an adapter adds to the vocabulary have no counterpart and are left out.
    """
    weights = adapter.weights
    by_place: dict[str, Squares] = {}
    for module, pair in sorted(weights.modules.items(), key=lambda item: _order(item[0])):
        place = f"layer {module.split('.')[1]}" if module.startswith("layers.") else module
        yield f"measures {place}"
        _add(by_place, place, low_rank_square(pair) if pair.magnitude is None else _dora_square(base, module, pair), base[module])
        if pair.bias is not None:
            _add(by_place, VECTORS, pair.bias.float().mul(pair.scaling).square().sum().item(), 0.0)
    if (pair := weights.embedding) is not None:
        yield "measures embed_tokens"
        square = low_rank_square(pair) if pair.magnitude is None else _dora_embedding_square(base, pair)
        _add(by_place, "embed_tokens", square, base["embed_tokens"])
    for name, tensor in weights.replaced.items():
        yield f"measures {name}"
        module = name.removesuffix(".weight")
        if tensor.dim() == 2:
            _add(by_place, module, _replaced_square(base, module, tensor), base[module])
        else:
            vector = base.decoder.vector_of(name).float().cpu()
            _add(by_place, VECTORS, (tensor.float().cpu() - vector).square().sum().item(), vector.square().sum().item())
    for name, part in weights.rows.items():
        module = name.removesuffix(".weight")
        yield f"measures rows of {module}"
        _add(by_place, f"rows of {module}", *_rows_squares(base, module, part))
    return tuple(DeltaNorm(place, sqrt(delta), sqrt(weight)) for place, (delta, weight) in by_place.items())


def _order(module: str) -> tuple[float, str]:
    """Layers by number, then what belongs to none."""
    return float(module.split(".")[1]) if module.startswith("layers.") else float("inf"), module


def _dora_square(base: WeightSquares, module: str, pair: LoraPair) -> float:
    """||m V / |V| - W||_F^2 with V = W + scaling B A, rows brought to the lengths m (arXiv 2402.09353, section 4)."""
    total = 0.0
    for first, rows in base.rows(module):
        here = slice(first, first + rows.shape[0])
        moved = rows + _product(pair.b[here], pair.a, pair.scaling, rows)
        lengths = torch.linalg.vector_norm(moved, dim=1).clamp_min_(_TINY)
        moved *= (pair.magnitude[here].float().to(rows.device) / lengths).unsqueeze(1)
        total += (moved - rows).square().sum(dtype=torch.float64).item()
    return total


def _dora_embedding_square(base: WeightSquares, pair: LoraPair) -> float:
    """The same for an embedding, whose columns are brought to lengths (PEFT's DoraEmbeddingLayer); two passes over W."""
    def moved_rows() -> Iterator[tuple[Tensor, Tensor]]:
        for first, rows in base.rows("embed_tokens"):
            yield rows, rows + _product(pair.a[:, first:first + rows.shape[0]].T, pair.b.T, pair.scaling, rows)

    lengths = sum(moved.square().sum(0, dtype=torch.float64) for _, moved in moved_rows()).sqrt().clamp_min(_TINY)
    gains = (pair.magnitude.flatten().double().to(lengths.device) / lengths).float()
    return sum((moved * gains - rows).square().sum(dtype=torch.float64).item() for rows, moved in moved_rows())


def _product(left: Tensor, right: Tensor, scaling: float, like: Tensor) -> Tensor:
    return (left.float().to(like.device) @ right.float().to(like.device)) * scaling


def _replaced_square(base: WeightSquares, module: str, tensor: Tensor) -> float:
    """Over the rows that both have."""
    total = 0.0
    for first, rows in base.rows(module):
        own = tensor[first:first + rows.shape[0]].float().to(rows.device)
        total += (own - rows[:own.shape[0]]).square().sum(dtype=torch.float64).item()
    return total


def _rows_squares(base: WeightSquares, module: str, part: TokenRows) -> Squares:
    weight, first, end = base.decoder.rows_of(module)
    known = part.ids < end - first
    old = rows_of_weight(weight, (part.ids[known] + first).to(weight.device)).float().cpu()
    return (part.values[known].float() - old).square().sum().item(), old.square().sum().item()


def _add(by_place: dict[str, Squares], place: str, delta: float, weight: float) -> None:
    before = by_place.get(place, (0.0, 0.0))
    by_place[place] = before[0] + delta, before[1] + weight

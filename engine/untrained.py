"""Whether an adapter leaves a base as it is: what only a comparison with the base's own numbers can tell."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.weights import rows as rows_of_weight
from .adapters.adapter import Adapter, LoraPair
from .deltas import WeightSquares
from .models.decoder import Decoder

_LENGTHS_APART = 1e-6
"""by which two sums of the same row differ, as a part of its length"""


def leaves_base(adapter: Adapter, decoder: Decoder) -> bool:
    """Whether all that `adapter` holds is what the base has, but for rounding: low-rank products of zero, the base's own lengths of rows
    (DoRA as it is before training), copies of its tensors and of its token rows.

    The first thing that differs ends the comparison, so only an adapter that was not trained costs a pass over what it copies.
    """
    return adapter.weights.vocab_rows(decoder.facts.vocab) == decoder.facts.vocab and all(_equal_parts(adapter, decoder))


def _equal_parts(adapter: Adapter, decoder: Decoder) -> Iterator[bool]:
    """Part by part, the cheap ones first, whether it is the base's."""
    weights, base = adapter.weights, WeightSquares(decoder)
    yield from (not _moves(pair) for pair in weights.pairs)
    for name, tensor in weights.replaced.items():
        if tensor.dim() == 1:
            yield _same(tensor, decoder.vector_of(name), decoder.dtype)
    for name, part in weights.rows.items():
        weight, first, _ = decoder.rows_of(name.removesuffix(".weight"))
        yield _same(part.values, rows_of_weight(weight, (part.ids + first).to(weight.device)), decoder.dtype)
    for module, pair in weights.modules.items():
        if pair.magnitude is not None:
            yield _same_lengths(pair.magnitude, [rows.norm(dim=1) for _, rows in base.rows(module)], decoder.dtype)
    if weights.embedding is not None and weights.embedding.magnitude is not None:
        squares = sum(rows.square().sum(0) for _, rows in base.rows("embed_tokens"))
        yield _same_lengths(weights.embedding.magnitude, [squares.sqrt()], decoder.dtype)
    for name, tensor in weights.replaced.items():
        if tensor.dim() == 2:
            chunks = base.rows(name.removesuffix(".weight"))
            yield all(_same(tensor[first:first + rows.shape[0]], rows, decoder.dtype) for first, rows in chunks)


def _moves(pair: LoraPair) -> bool:
    return bool(pair.scaling) and bool(pair.a.any() and pair.b.any() or pair.bias is not None and pair.bias.any())


def _same(own: Tensor, base: Tensor, dtype: torch.dtype) -> bool:
    """Whether both are equal in the coarser of the adapter's dtype and the base's."""
    coarse = max(own.dtype, dtype, key=lambda kind: torch.finfo(kind).eps)
    return own.shape == base.shape and torch.equal(own.to(base.device, coarse), base.to(coarse))


def _same_lengths(magnitude: Tensor, lengths: list[Tensor], dtype: torch.dtype) -> bool:
    base = torch.cat(lengths)
    rounding = max(torch.finfo(magnitude.dtype).eps, torch.finfo(dtype).eps) / 2
    return torch.allclose(magnitude.flatten().to(base), base, rtol=rounding + _LENGTHS_APART, atol=0)

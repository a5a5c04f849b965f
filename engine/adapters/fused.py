"""Adapters whose q, k, v (or gate and up) are split where the base has them as one matrix, or the other way round."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..models.facts import ModelFacts
from .adapter import LoraPair
from .errors import AdapterError


def fused_parts(facts: ModelFacts) -> dict[str, dict[str, int]]:
    """A fused module of a layer -> the modules that it is in bases that do not fuse, and their outputs; in the order of its rows."""
    return {
        "self_attn.qkv_proj": {"self_attn.q_proj": facts.q_out, "self_attn.k_proj": facts.kv_out, "self_attn.v_proj": facts.kv_out},
        "mlp.gate_up_proj": {"mlp.gate_proj": facts.intermediate, "mlp.up_proj": facts.intermediate},
    }


def other_shapes(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """The modules that the base has in the other layout -> (d_out, d_in): split ones of a fused base, fused ones of a split base."""
    shapes = {}
    for fused, parts in fused_parts(facts).items():
        named = parts if facts.fused else {fused: sum(parts.values())}
        shapes |= {f"layers.{layer}.{name}": (rows, facts.hidden) for layer in range(facts.layers) for name, rows in named.items()}
    return shapes


def regroup(pairs: Mapping[str, LoraPair], facts: ModelFacts, file: Path) -> dict[str, LoraPair]:
    """`pairs` by the modules of the base: those of the other layout are joined or cut, which changes nothing of what they compute.

    Raises AdapterError where a module is given in both layouts, and where DoRA acts on a part of a fused module alone.
    """
    result = dict(pairs)
    for layer in range(facts.layers):
        for fused, parts in fused_parts(facts).items():
            whole, names = f"layers.{layer}.{fused}", [f"layers.{layer}.{name}" for name in parts]
            given = [name for name in names if name in result]
            if whole in result and given:
                raise AdapterError(f"{file}: has deltas for {whole} and for {given[0]}, which is a part of it; "
                                   "it is ambiguous which to use")
            if facts.fused and given:
                result[whole] = _join([result.pop(name, None) for name in names], list(parts.values()), whole, file)
            elif not facts.fused and whole in result:
                result |= dict(zip(names, _cut(result.pop(whole), list(parts.values())), strict=True))
    return result


def _join(parts: Sequence[LoraPair | None], rows: Sequence[int], module: str, file: Path) -> LoraPair:
    """One pair whose rows are the parts': A one under the other, B block by block."""
    given = [part for part in parts if part is not None]
    if any(part.magnitude is not None for part in given) and len(given) < len(parts):
        raise AdapterError(f"{file}: has DoRA on a part of {module} alone; the base has that as one matrix, "
                           "load a base that has them apart")
    scalings = {part.scaling for part in given}
    dtype = given[0].a.dtype if len(scalings) == 1 and len({part.a.dtype for part in given}) == 1 else torch.float32
    scaling = given[0].scaling if len(scalings) == 1 else 1.0
    b = torch.zeros(sum(rows), sum(part.rank for part in given), dtype=dtype)
    bias = torch.zeros(sum(rows)) if any(part.bias is not None for part in given) else None
    column = 0
    for part, first, count in zip(parts, accumulate(rows, initial=0), rows, strict=False):
        if part is None:
            continue
        factor = 1.0 if len(scalings) == 1 else part.scaling
        b[first:first + count, column:column + part.rank] = part.b.to(dtype) * factor
        if bias is not None and part.bias is not None:
            bias[first:first + count] = part.bias.float() * factor
        column += part.rank
    magnitudes = [part.magnitude.float() for part in given if part.magnitude is not None]
    a = torch.cat([part.a.to(dtype) for part in given])
    return LoraPair(a, b, scaling, bias, torch.cat(magnitudes) if magnitudes else None)


def _cut(pair: LoraPair, rows: Sequence[int]) -> list[LoraPair]:
    """The pairs of the parts: rows of B, of its bias and of the magnitude; A is shared."""
    def split(tensor: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * len(rows) if tensor is None else [part.contiguous() for part in tensor.split(list(rows))]

    return [LoraPair(pair.a, b, pair.scaling, bias, magnitude)
            for b, bias, magnitude in zip(split(pair.b), split(pair.bias), split(pair.magnitude), strict=True)]

"""What an adapter is on the device, and the slots that hold it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor

from .adapters.adapter import Adapter, LoraPair
from .adapters.errors import AdapterError
from .models.facts import ModelFacts, linear_layout


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One adapter's share of one fused linear. `a` [k, d_in], slice-major; `b[i]` [k_i, d_out_i], scaling folded in, or None."""

    a: Tensor
    b: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class SlotContent:
    """One adapter on the device. Parts by (layer, fused linear); lm_head by (number of layers, "lm_head")."""

    parts: Mapping[tuple[int, str], FusedPart]
    nbytes: int
    rank: int


@dataclass(slots=True)
class Slot:
    """A place for one adapter. `generation` grows with every content, so (index, generation) names a content for ever."""

    index: int
    adapter: str = ""
    content: SlotContent | None = None
    generation: int = 0
    last_used: float = 0.0

    def fill(self, adapter: str, content: SlotContent) -> None:
        self.adapter, self.content = adapter, content
        self.generation += 1
        self.last_used = monotonic()

    def clear(self) -> int:
        """Free the place; the bytes that the content took."""
        freed = self.content.nbytes if self.content else 0
        self.adapter, self.content = "", None
        return freed


def fused_modules(facts: ModelFacts) -> dict[tuple[int, str], tuple[str, ...]]:
    """(layer, fused linear) -> canonical names of its modules in order; lm_head last, by (layers, "lm_head")."""
    table = {
        (layer, fused): tuple(f"layers.{layer}.{module}" for module in modules)
        for layer in range(facts.layers) for fused, modules in linear_layout(facts).items()
    }
    table[facts.layers, "lm_head"] = ("lm_head",)
    return table


def build_content(adapter: Adapter, facts: ModelFacts, device: torch.device, dtype: torch.dtype) -> SlotContent:
    """`adapter` as a slot holds it: on `device`, in `dtype`; scaling is folded into B in fp32 before it is rounded to `dtype`.

    Raises AdapterError when B times its scaling is too large for `dtype`.
    """
    parts: dict[tuple[int, str], FusedPart] = {}
    nbytes = 0
    for key, modules in fused_modules(facts).items():
        pairs = [adapter.modules.get(module) for module in modules]
        present = [pair for pair in pairs if pair is not None]
        if not present:
            continue
        a = torch.cat([pair.a.to(device, dtype) for pair in present])
        b = tuple(None if pair is None else _expand_factor(pair, device, dtype) for pair in pairs)
        if not all(torch.isfinite(factor).all() for factor in (a, *(factor for factor in b if factor is not None))):
            raise AdapterError(f"adapter {adapter.info.name!r}: the weights of {' or '.join(modules)} times their effective scale are "
                               f"too large for {str(dtype).removeprefix('torch.')}; load the base with --dtype fp32 or lower lora_alpha")
        parts[key] = FusedPart(a, b)
        nbytes += a.nbytes + sum(factor.nbytes for factor in b if factor is not None)
    return SlotContent(parts, nbytes, max(pair.rank for pair in adapter.modules.values()))


def _expand_factor(pair: LoraPair, device: torch.device, dtype: torch.dtype) -> Tensor:
    """scaling * B^T [r, d_out], contiguous."""
    return pair.b.to(device, torch.float32).mul(pair.scaling).T.contiguous().to(dtype)

"""The RoPE tables of a decoder: cos and sin of every position that a request may have."""
from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.rope import inverse_frequencies, llama3_frequencies, rope_table, yarn_frequencies
from ...kernels.weights import Weight
from .facts import ModelFacts, Rope, RopeScaling

Table = tuple[Tensor, Tensor]
GLOBAL, LOCAL = 0, 1
"""places of the tables in what `RopeTables.rows` returns"""


class RopeTables:
    """Tables of `context` positions, on `device`, fp32: one for all layers, and one of the layers with a window where theirs differs.

    longrope turns a request of more tokens than it was trained for by other factors, from its first token on, as transformers does for
    a prompt of that length. The rows of those lie behind the others: see `start`.
    """

    def __init__(self, facts: ModelFacts, weights: dict[str, Weight], context: int, device: torch.device) -> None:
        """Takes the factors of RoPE out of `weights`. `tables`: (cos, sin) [positions, rotary] each, by GLOBAL and LOCAL."""
        self._context, self._long_after = context, facts.long_after
        factors = {name: weights.pop(f"{name}.weight", None) for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")}
        short = _table(Rope(facts.rope_theta, facts.rope_scaling), facts.rotary, factors, "short", context, device)
        self.tables: list[Table] = [short]
        if self.has_long:
            long = _table(Rope(facts.rope_theta, facts.rope_scaling), facts.rotary, factors, "long", context, device)
            self.tables = [(torch.cat((short[0], long[0])), torch.cat((short[1], long[1])))]
        if facts.local_rope is not None:
            self.tables.append(_table(facts.local_rope, facts.rotary, {}, "short", context, device))

    @property
    def has_long(self) -> bool:
        """Whether a request can be long enough for longrope's other factors."""
        return 0 < self._long_after < self._context

    def start(self, tokens: int) -> int:
        """The row of the tables where position 0 of a request of `tokens` tokens lies."""
        return self._context if self.has_long and tokens > self._long_after else 0

    def rows(self, places: Tensor) -> list[Table]:
        """(cos, sin) [tokens, 1, rotary] of each table at `places` [tokens] int64: positions behind a request's `start`."""
        return [(cos[places].unsqueeze(1), sin[places].unsqueeze(1)) for cos, sin in self.tables]


def _table(rope: Rope, rotary: int, factors: dict[str, Weight | None], length: str, context: int, device: torch.device) -> Table:
    inverse = _frequencies(rope, rotary, factors, length)
    if (divisors := factors.get("rope_freqs")) is not None:
        inverse = inverse / divisors.cpu().double()
    return rope_table(inverse, context, torch.float32, device, rope.scaling.attention_factor if rope.scaling else 1.0)


def _frequencies(rope: Rope, rotary: int, factors: dict[str, Weight | None], length: str) -> Tensor:
    inverse, scaling = inverse_frequencies(rotary, rope.theta), rope.scaling
    if scaling is None or scaling.kind == "dynamic":  # dynamic scaling begins where the longest context here ends
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "longrope":
        return inverse / _longrope_divisors(scaling, factors, length)
    if scaling.kind == "yarn":
        return yarn_frequencies(
            inverse, rope.theta, scaling.factor, scaling.original_context, scaling.beta_fast, scaling.beta_slow, scaling.truncate)
    return llama3_frequencies(inverse, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context)


def _longrope_divisors(scaling: RopeScaling, factors: dict[str, Weight | None], length: str) -> Tensor:
    held = factors.get(f"rope_factors_{length}")
    if held is not None:
        return held.cpu().double()
    return torch.tensor(scaling.short_factors if length == "short" else scaling.long_factors, dtype=torch.float64)

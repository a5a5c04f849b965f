"""What the adapters of a step do at each place of a decoder: under its linears, at its norms, its embedding, its head.

The decoder calls these and knows no adapter; without an active one each is the base's own operation and nothing else.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...kernels.lora import LoraLinear, LoraStep, lora_expand_, lora_shrink
from ...kernels.norm import RmsNorm
from ...kernels.weights import Weight, base_linear, rows
from ..routing import Routing

Lap = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix product of the forward, perhaps several modules of the base laid one under the other."""

    name: str
    """of its LoraLinear in a Routing: "qkv_proj", "o_proj", "gate_up_proj", "down_proj" or "lm_head" """
    weight: Weight
    """[d_out, d_in]"""
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the base by its canonical name, the layer's part left out: "input_layernorm", "norm"."""

    name: str
    rms: RmsNorm


@dataclass(frozen=True, slots=True)
class ActiveLora:
    """What the adapters of a step add: their rank rows, and the weights of this step's tokens."""

    routing: Routing
    step: LoraStep

    def at_layer(self, index: int) -> Deltas:
        return Deltas(self.routing.layers[index], self.step)

    def at_head(self, sampled: Tensor) -> Deltas:
        """For the head (and the last norm) on the rows `sampled` of the step."""
        if self.routing.head is None:
            return NO_DELTAS
        return Deltas({"lm_head": self.routing.head}, self.step.select(sampled))


@dataclass(frozen=True, slots=True)
class Deltas:
    """ActiveLora at one layer, or at the head."""

    linears: Mapping[str, LoraLinear]
    step: LoraStep | None


NO_DELTAS = Deltas({}, None)


def embed(ids: Tensor, weight: Weight, lora: ActiveLora | None) -> Tensor:
    """Rows [T, hidden] of the embedding for `ids` [T], before the architecture scales them."""
    return rows(weight, ids)


def norm(x: Tensor, layer_norm: Norm, deltas: Deltas) -> Tensor:
    """`layer_norm` of x [T, ..., d]."""
    return layer_norm.rms(x)


def linear(x: Tensor, base: Linear, deltas: Deltas, lap: Lap) -> Tensor:
    """Semantics: y = x W^T + bias + (row_weights * (x A^T)) B. Without an adapter here it is the base product and nothing else."""
    lap("other")
    y = base_linear(x, base.weight, base.bias)
    lap("base matmul")
    added = deltas.linears.get(base.name)
    if added is not None and deltas.step is not None:
        h = lora_shrink(x, added.a, deltas.step.row_weights(added))
        lap("shrink")
        lora_expand_(y, h, added.slices)
        lap("expand")
    return y

"""The layers of a decoder: its matrices side by side, its norms, and what it may see and turn."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.norm import RmsNorm
from ...kernels.weights import Weight, concat_rows, laid_out
from .acting import Linear, Norm
from .facts import ModelFacts, layer_norms, linear_layout
from .rope import GLOBAL, LOCAL

NO_ROPE = -1


@dataclass(frozen=True, slots=True)
class Layer:
    """None stands for a norm that the architecture does not have."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    rope: int
    """which of the RoPE tables turns q and k, or NO_ROPE"""
    window: int
    """tokens that one may look at, itself included; 0 for all"""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Norm, ...]:
        places = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, self.q_norm, self.k_norm
        return tuple(place for place in places if place is not None)


def take_layer(weights: dict[str, Weight], index: int, facts: ModelFacts, dtype: torch.dtype) -> Layer:
    """Layer `index` out of `weights`, which loses what it takes."""
    name, places = f"layers.{index}", facts.norms
    linears = {
        fused: _fused(weights, fused, [f"{name}.{module}" for module in modules]) for fused, modules in linear_layout(facts).items()
    }
    norms = {kind: Norm(kind, RmsNorm(weights.pop(f"{name}.{kind}.weight"), facts.rms_eps, dtype)) for kind in layer_norms(facts)}
    window = facts.windows[index] if facts.windows else 0
    return Layer(
        qkv=linears["qkv_proj"], o=linears["o_proj"], gate_up=linears["gate_up_proj"], down=linears["down_proj"],
        before_attention=norms.get(places.before_attention), after_attention=norms.get(places.after_attention),
        before_mlp=norms.get(places.before_mlp), after_mlp=norms.get(places.after_mlp),
        q_norm=norms.get("self_attn.q_norm"), k_norm=norms.get("self_attn.k_norm"),
        rope=NO_ROPE if index in facts.layers_without_rope else LOCAL if window and facts.local_rope is not None else GLOBAL, window=window)


def _fused(weights: dict[str, Weight], name: str, modules: list[str]) -> Linear:
    """The modules' weights one under the other; the parts are freed."""
    parts = [weights.pop(f"{module}.weight") for module in modules]
    biases = [weights.pop(f"{module}.bias") for module in modules if f"{module}.bias" in weights]
    weight = laid_out(concat_rows(parts), gated=name == "gate_up_proj")
    return Linear(name, weight, torch.cat(biases) if biases else None)

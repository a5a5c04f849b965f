"""The llama-shaped decoder: RMSNorm, rotary grouped-query attention, SwiGLU, and an adapter's deltas under every linear."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention import cache_write_, paged_attention
from ...kernels.lora import LoraLinear, LoraStep, lora_expand_, lora_shrink
from ...kernels.norm import RmsNorm
from ...kernels.rope import inverse_frequencies, llama3_frequencies, rope_, rope_table
from ..batch import StepInputs
from ..routing import Routing
from .facts import ModelFacts

Lap = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix product of the forward, perhaps several modules of the base laid one under the other."""

    name: str
    """of its LoraLinear in a Routing: "qkv_proj", "o_proj", "gate_up_proj", "down_proj" or "lm_head" """
    weight: Tensor
    """[d_out, d_in]"""
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: RmsNorm
    qkv: Linear
    o: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ActiveLora:
    """What the adapters of a step add: their rank rows, and the weights of this step's tokens."""

    routing: Routing
    step: LoraStep


@dataclass(frozen=True, slots=True)
class Deltas:
    """ActiveLora at one layer (or at the head)."""

    linears: Mapping[str, LoraLinear]
    step: LoraStep | None


NO_DELTAS = Deltas({}, None)


class Decoder:
    """A base in memory. `weights` (canonical names) is emptied while the fused weights are made, so the peak is one layer more."""

    def __init__(self, facts: ModelFacts, weights: dict[str, Tensor], context: int) -> None:
        self.facts = facts
        self._embed = weights.pop("embed_tokens.weight")
        self.layers = [_layer(weights, f"layers.{i}", facts.rms_eps) for i in range(facts.layers)]
        self._norm = RmsNorm(weights.pop("norm.weight"), facts.rms_eps)
        self._head = Linear("lm_head", self._embed if facts.tied else weights.pop("lm_head.weight"), None)
        self.device, self.dtype = self._embed.device, self._embed.dtype
        self._cos, self._sin = _rope(facts, weights.pop("rope_freqs.weight", None), context, self.device)

    @property
    def nbytes(self) -> int:
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        tensors = [tensor for linear in linears for tensor in (linear.weight, linear.bias) if tensor is not None]
        tensors += [norm.weight for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        tensors += [self._embed, self._norm.weight] + ([] if self.facts.tied else [self._head.weight])
        return sum(tensor.nbytes for tensor in tensors)

    def kv_cache(self, blocks: int, block_tokens: int) -> list[Tensor]:
        """A layer's cache each, [blocks, block_tokens, 2 * kv_heads, head_dim]; memory that is never touched costs nothing on the CPU."""
        shape = (blocks, block_tokens, 2 * self.facts.kv_heads, self.facts.head_dim)
        return [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: list[Tensor], lora: ActiveLora | None, lap: Lap) -> Tensor:
        """Logits [sampled rows, vocab] of a step; its keys and values are stored in `caches`."""
        x = F.embedding(inputs.ids, self._embed)
        rope = self._cos[inputs.positions].unsqueeze(1), self._sin[inputs.positions].unsqueeze(1)
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            deltas = Deltas(lora.routing.layers[index], lora.step) if lora is not None else NO_DELTAS
            x = x + self._attention(layer.attention_norm(x), layer, cache, rope, inputs, deltas, lap)
            x = x + self._mlp(layer.mlp_norm(x), layer, deltas, lap)
        rows = self._norm(x.index_select(0, inputs.sampled))
        deltas = NO_DELTAS
        if lora is not None and lora.routing.head is not None:
            deltas = Deltas({"lm_head": lora.routing.head}, lora.step.select(inputs.sampled))
        return _linear(rows, self._head, deltas, lap)

    def _attention(
        self, x: Tensor, layer: Layer, cache: Tensor, rope: tuple[Tensor, Tensor], inputs: StepInputs, deltas: Deltas, lap: Lap,
    ) -> Tensor:
        facts = self.facts
        qkv = _linear(x, layer.qkv, deltas, lap).view(x.shape[0], -1, facts.head_dim)
        rope_(qkv[:, : facts.heads + facts.kv_heads], *rope)
        cache_write_(cache, inputs.cells, qkv[:, facts.heads :])
        lap("other")
        mixed = paged_attention(qkv[:, : facts.heads], cache, inputs.spans)
        lap("attention")
        return _linear(mixed, layer.o, deltas, lap)

    def _mlp(self, x: Tensor, layer: Layer, deltas: Deltas, lap: Lap) -> Tensor:
        gate, up = _linear(x, layer.gate_up, deltas, lap).chunk(2, -1)
        return _linear(F.silu(gate).mul_(up), layer.down, deltas, lap)


def _linear(x: Tensor, linear: Linear, deltas: Deltas, lap: Lap) -> Tensor:
    """Semantics: y = x W^T + bias + (row_weights * (x A^T)) B. Without an adapter here it is the base product and nothing else."""
    lap("other")
    y = F.linear(x, linear.weight, linear.bias)
    lap("base matmul")
    added = deltas.linears.get(linear.name)
    if added is not None and deltas.step is not None:
        h = lora_shrink(x, added.a, deltas.step.row_weights(added))
        lap("shrink")
        lora_expand_(y, h, added.slices)
        lap("expand")
    return y


def _layer(weights: dict[str, Tensor], name: str, eps: float) -> Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return Layer(
        attention_norm=RmsNorm(weights.pop(f"{name}.input_layernorm.weight"), eps),
        qkv=_fused(weights, "qkv_proj", [f"{attention}.{part}_proj" for part in "qkv"]),
        o=_fused(weights, "o_proj", [f"{attention}.o_proj"]),
        mlp_norm=RmsNorm(weights.pop(f"{name}.post_attention_layernorm.weight"), eps),
        gate_up=_fused(weights, "gate_up_proj", [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
        down=_fused(weights, "down_proj", [f"{mlp}.down_proj"]),
    )


def _fused(weights: dict[str, Tensor], name: str, modules: list[str]) -> Linear:
    """The modules' weights one under the other; the parts are freed."""
    parts = [weights.pop(f"{module}.weight") for module in modules]
    biases = [weights.pop(f"{module}.bias") for module in modules if f"{module}.bias" in weights]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    return Linear(name, weight, torch.cat(biases) if biases else None)


def _rope(facts: ModelFacts, factors: Tensor | None, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    inverse = inverse_frequencies(facts.head_dim, facts.rope_theta)
    scaling = facts.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None:
        inverse = llama3_frequencies(
            inverse, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context)
    if factors is not None:
        inverse = inverse / factors.cpu().double()
    return rope_table(inverse, context, torch.float32, device)

"""The llama-shaped decoder: RMSNorm, rotary grouped-query attention, SwiGLU, and an adapter's deltas under every linear."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention import cache_write_, paged_attention
from ...kernels.norm import RmsNorm
from ...kernels.rope import inverse_frequencies, llama3_frequencies, rope_, rope_table
from ...kernels.weights import Weight, concat_rows
from ..batch import StepInputs
from .acting import NO_DELTAS, ActiveLora, Deltas, Lap, Linear, Norm, embed, linear, norm
from .facts import ModelFacts, linear_layout, module_shapes


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Decoder:
    """A base in memory. `weights` (canonical names) is emptied while the fused weights are made, so the peak is one layer more."""

    def __init__(self, facts: ModelFacts, weights: dict[str, Tensor], context: int) -> None:
        self.facts = facts
        self._embed = weights.pop("embed_tokens.weight")
        self.layers = [_layer(weights, f"layers.{i}", facts) for i in range(facts.layers)]
        self._norm = Norm("norm", RmsNorm(weights.pop("norm.weight"), facts.rms_eps))
        self._head = Linear("lm_head", self._embed if facts.tied else weights.pop("lm_head.weight"), None)
        self.device, self.dtype = self._embed.device, self._embed.dtype
        self._cos, self._sin = _rope(facts, weights.pop("rope_freqs.weight", None), context, self.device)

    @property
    def nbytes(self) -> int:
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        tensors = [tensor for linear in linears for tensor in (linear.weight, linear.bias) if tensor is not None]
        tensors += [place.rms.weight for layer in self.layers for place in (layer.attention_norm, layer.mlp_norm)]
        tensors += [self._embed, self._norm.rms.weight] + ([] if self.facts.tied else [self._head.weight])
        return sum(tensor.nbytes for tensor in tensors)

    def rows_of(self, module: str) -> tuple[Weight, int, int]:
        """The matrix that holds the weight of a module by its canonical name ("embed_tokens" too), and its first and end row there."""
        if module == "embed_tokens":
            return self._embed, 0, self._embed.shape[0]
        linear, first, end = self._place(module)
        return linear.weight, first, end

    def vector_of(self, name: str) -> Tensor:
        """The weight of a norm, or the bias of a linear that has one, by its canonical name; as it is in memory."""
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            linear, first, end = self._place(module)
            return linear.bias[first:end]
        _, index, inner = module.split(".", 2) if "." in module else ("", "", module)
        norms = (self.layers[int(index)].attention_norm, self.layers[int(index)].mlp_norm) if index else (self._norm,)
        return next(norm.rms.weight for norm in norms if norm.name == inner)

    def _place(self, module: str) -> tuple[Linear, int, int]:
        """The product that holds a linear, and its first and end row there."""
        if module == "lm_head":
            return self._head, 0, self._head.weight.shape[0]
        _, index, name = module.split(".", 2)
        layer, shapes = self.layers[int(index)], module_shapes(self.facts)
        linears = {linear.name: linear for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)}
        for fused, modules in linear_layout(self.facts).items():
            if name in modules:
                before = sum(shapes[f"layers.{index}.{other}"][0] for other in modules[:modules.index(name)])
                return linears[fused], before, before + shapes[module][0]
        raise KeyError(module)

    def kv_cache(self, blocks: int, block_tokens: int) -> list[Tensor]:
        """A layer's cache each, [blocks, block_tokens, 2 * kv_heads, head_dim]; memory that is never touched costs nothing on the CPU."""
        shape = (blocks, block_tokens, 2 * self.facts.kv_heads, self.facts.head_dim)
        return [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: list[Tensor], lora: ActiveLora | None, lap: Lap) -> Tensor:
        """Logits [sampled rows, vocab] of a step; its keys and values are stored in `caches`."""
        x = embed(inputs.ids, self._embed, lora)
        rope = self._cos[inputs.positions].unsqueeze(1), self._sin[inputs.positions].unsqueeze(1)
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            deltas = lora.at_layer(index) if lora is not None else NO_DELTAS
            x = x + self._attention(norm(x, layer.attention_norm, deltas), layer, cache, rope, inputs, deltas, lap)
            x = x + self._mlp(norm(x, layer.mlp_norm, deltas), layer, deltas, lap)
        deltas = lora.at_head(inputs.sampled) if lora is not None else NO_DELTAS
        return linear(norm(x.index_select(0, inputs.sampled), self._norm, deltas), self._head, deltas, lap)

    def _attention(
        self, x: Tensor, layer: Layer, cache: Tensor, rope: tuple[Tensor, Tensor], inputs: StepInputs, deltas: Deltas, lap: Lap,
    ) -> Tensor:
        facts = self.facts
        qkv = linear(x, layer.qkv, deltas, lap).view(x.shape[0], -1, facts.head_dim)
        rope_(qkv[:, : facts.heads + facts.kv_heads], *rope)
        cache_write_(cache, inputs.cells, qkv[:, facts.heads :])
        lap("other")
        mixed = paged_attention(qkv[:, : facts.heads], cache, inputs.spans)
        lap("attention")
        return linear(mixed, layer.o, deltas, lap)

    def _mlp(self, x: Tensor, layer: Layer, deltas: Deltas, lap: Lap) -> Tensor:
        gate, up = linear(x, layer.gate_up, deltas, lap).chunk(2, -1)
        return linear(F.silu(gate).mul_(up), layer.down, deltas, lap)


def _layer(weights: dict[str, Weight], name: str, facts: ModelFacts) -> Layer:
    linears = {
        fused: _fused(weights, fused, [f"{name}.{module}" for module in modules]) for fused, modules in linear_layout(facts).items()
    }
    norms = {kind: Norm(kind, RmsNorm(weights.pop(f"{name}.{kind}.weight"), facts.rms_eps)) for kind in facts.norms.names}
    return Layer(
        attention_norm=norms["input_layernorm"], qkv=linears["qkv_proj"], o=linears["o_proj"],
        mlp_norm=norms["post_attention_layernorm"], gate_up=linears["gate_up_proj"], down=linears["down_proj"])


def _fused(weights: dict[str, Weight], name: str, modules: list[str]) -> Linear:
    """The modules' weights one under the other; the parts are freed."""
    parts = [weights.pop(f"{module}.weight") for module in modules]
    biases = [weights.pop(f"{module}.bias") for module in modules if f"{module}.bias" in weights]
    return Linear(name, concat_rows(parts), torch.cat(biases) if biases else None)


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

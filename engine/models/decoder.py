"""The decoder: RMSNorm, rotary grouped-query attention, gated MLP, and an adapter's deltas at every place. Its facts say all else."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.attention import Reach, Scores, cache_write_, paged_attention, reaches
from ...kernels.head_tiles import Turn, head_tiles
from ...kernels.norm import RmsNorm
from ...kernels.packed_cpu import CpuWeight
from ...kernels.prefill_attention import Pieces
from ...kernels.residual_norm import residual_norm
from ...kernels.rope import rope_
from ...kernels.triton_compat import runs_triton
from ...kernels.weights import Weight, laid_out
from ..batch import StepInputs
from .acting import (
    NO_DELTAS,
    ActiveLora,
    Deltas,
    Lap,
    Linear,
    Norm,
    begun_linear,
    changed_norm,
    changes_norm,
    embed,
    gated_linear,
    linear,
    norm,
)
from .facts import ModelFacts, linear_layout, module_shapes
from .layers import NO_ROPE, Layer, take_layer
from .rope import RopeTables, Table

if TYPE_CHECKING:
    from .cpu_forward import CpuForward


class Decoder:
    """A base in memory. `weights` (canonical names) is emptied while the fused weights are made, so the peak is one layer more.

    `embedding`, `layers`, `norm` (the last one) and `head` are its places in the order of a forward.
    """

    def __init__(self, facts: ModelFacts, weights: dict[str, Weight], context: int) -> None:
        self.facts, self.context = facts, context
        self.embedding = laid_out(weights.pop("embed_tokens.weight"))
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.layers = [take_layer(weights, i, facts, self.dtype) for i in range(facts.layers)]
        self.norm = Norm("norm", RmsNorm(weights.pop("norm.weight"), facts.rms_eps, self.dtype))
        self.head = Linear("lm_head", self.embedding if facts.tied else laid_out(weights.pop("lm_head.weight")), None)
        self.rope = RopeTables(facts, weights, context, self.device)
        self.scores = Scores(facts.attention_scale or None, facts.attention_softcap)
        scale = facts.embedding_scale
        self.embedding_scale = torch.tensor(scale).to(self.dtype).item() if facts.rounded_embedding_scale else scale
        self._replies = _cpu_forward(self) if self.multiplies_packed else None

    @property
    def nbytes(self) -> int:
        linears = [linear for layer in self.layers for linear in layer.linears]
        tensors = [tensor for linear in linears for tensor in (linear.weight, linear.bias) if tensor is not None]
        tensors += [place.rms.weight for layer in self.layers for place in layer.norms]
        tensors += [self.embedding, self.norm.rms.weight] + ([] if self.facts.tied else [self.head.weight])
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def multiplies_packed(self) -> bool:
        """Whether linears are multiplied packed, by a CPU."""
        return any(isinstance(linear.weight, CpuWeight) for linear in self.layers[0].linears)

    @property
    def compiles(self) -> str:
        """What its first step compiles before it runs, which takes seconds; "" for nothing."""
        if self._replies is None:
            return ""
        from ...kernels.cpu.compiled import BESIDE, PLACE, is_kept
        if PLACE is None:
            return f"compiling for this CPU at every start, as neither {BESIDE} nor the user's cache can be written"
        return "" if is_kept("decode_step") else "compiling for this CPU, once, about ten seconds"

    @property
    def parameters(self) -> int:
        """Numbers of its matrices."""
        matrices = [self.embedding, *(linear.weight for layer in self.layers for linear in layer.linears)]
        matrices += [] if self.facts.tied else [self.head.weight]
        return sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices)

    def rows_of(self, module: str) -> tuple[Weight, int, int]:
        """The matrix that holds the weight of a module by its canonical name ("embed_tokens" too), and its first and end row there."""
        if module == "embed_tokens":
            return self.embedding, 0, self.embedding.shape[0]
        linear, first, end = self._place(module)
        return linear.weight, first, end

    def vector_of(self, name: str) -> Tensor:
        """The weight of a norm, or the bias of a linear that has one, by its canonical name; as it is in memory."""
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            linear, first, end = self._place(module)
            return linear.bias[first:end]
        _, index, inner = module.split(".", 2) if "." in module else ("", "", module)
        norms = self.layers[int(index)].norms if index else (self.norm,)
        return next(norm.rms.weight for norm in norms if norm.name == inner)

    def _place(self, module: str) -> tuple[Linear, int, int]:
        """The product that holds a linear, and its first and end row there."""
        if module == "lm_head":
            return self.head, 0, self.head.weight.shape[0]
        _, index, name = module.split(".", 2)
        layer, shapes = self.layers[int(index)], module_shapes(self.facts)
        linears = {linear.name: linear for linear in layer.linears}
        for fused, modules in linear_layout(self.facts).items():
            if name in modules:
                before = sum(shapes[f"layers.{index}.{other}"][0] for other in modules[:modules.index(name)])
                return linears[fused], before, before + shapes[module][0]
        raise KeyError(module)

    def kv_cache(self, blocks: int, block_tokens: int) -> Tensor:
        """[layers, 2, kv_heads, blocks, block_tokens, head_dim], uninitialised: memory that is never touched costs nothing on the CPU."""
        shape = (self.facts.layers, 2, self.facts.kv_heads, blocks, block_tokens, self.facts.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: Tensor, lora: ActiveLora | None, lap: Lap) -> Tensor:
        """Logits [sampled rows, vocab] of a step; its keys and values are stored in `caches`."""
        if self._replies is not None and self._replies.takes(inputs, lora):
            return self._head(self._replies.forward(inputs, caches, lora, lap), inputs, lora, lap)
        x = embed(inputs.ids, self.embedding, lora)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        rope = self.rope.rows(inputs.rope_rows)
        # found where the first layer of a window asks: the device has work by then
        look = cache(lambda window: reaches(inputs.spans, caches, self.facts.heads, window, self.scores))
        deltas = [lora.at_layer(index) if lora is not None else NO_DELTAS for index in range(len(self.layers))]
        following = [*((layer.before_attention, each) for layer, each in zip(self.layers[1:], deltas[1:], strict=True)), (None, NO_DELTAS)]
        normed = _normed(x, self.layers[0].before_attention, deltas[0])
        for layer, stored, each, (after, its) in zip(self.layers, caches, deltas, following, strict=True):
            mixed = self._attention(normed, layer, stored, rope, inputs.cells, look, each, lap)
            x, normed = self._joined(x, mixed, layer.after_attention, layer.before_mlp, each, each)
            x, normed = self._joined(x, self._mlp(normed, layer, each, lap), layer.after_mlp, after, each, its)
        return self._head(x, inputs, lora, lap)

    def _head(self, x: Tensor, inputs: StepInputs, lora: ActiveLora | None, lap: Lap) -> Tensor:
        at_head = lora.at_head() if lora is not None else NO_DELTAS
        return self.capped_(linear(norm(x.index_select(0, inputs.sampled), self.norm, at_head), self.head, at_head, lap))

    def _attention(
        self, x: Tensor, layer: Layer, stored: Tensor, rope: list[Table], cells: Tensor, look: Callable[[int], Sequence[Reach] | Pieces],
        deltas: Deltas, lap: Lap,
    ) -> Tensor:
        heads = self.facts.heads
        if self._takes_heads(x, layer, deltas):
            qkv, left = begun_linear(x, layer.qkv, deltas, lap)
            turn = Turn(*rope[layer.rope], _weight(layer.q_norm), _weight(layer.k_norm), self.facts.rms_eps)
            q = head_tiles(qkv.view(x.shape[0], -1, self.facts.head_dim), heads, turn, stored, cells, left)
        else:
            qkv = linear(x, layer.qkv, deltas, lap).view(x.shape[0], -1, self.facts.head_dim)
            if self.facts.qk_norm:
                self.norm_heads_(qkv, layer, deltas)
            if layer.rope != NO_ROPE:
                rope_(qkv[:, : heads + self.facts.kv_heads, : self.facts.rotary], *rope[layer.rope])
            cache_write_(stored, cells, qkv[:, heads:])
            q = qkv[:, :heads]
        lap("other")
        mixed = paged_attention(q, stored, look(layer.window), self.scores)
        lap("attention")
        return linear(mixed, layer.o, deltas, lap)

    def _takes_heads(self, x: Tensor, layer: Layer, deltas: Deltas) -> bool:
        """Whether `head_tiles` does what this layer and these adapters ask of heads."""
        facts = self.facts
        if layer.rope == NO_ROPE or facts.rotary != facts.head_dim or facts.qk_norm == "all" or not runs_triton(x):
            return False
        return layer.q_norm is None or not changes_norm(layer.q_norm, deltas) and not changes_norm(layer.k_norm, deltas)

    def norm_heads_(self, qkv: Tensor, layer: Layer, deltas: Deltas) -> None:
        """q_norm and k_norm in place, of every head by itself or of all together."""
        for heads, place in ((slice(0, self.facts.heads), layer.q_norm), (slice(self.facts.heads, -self.facts.kv_heads), layer.k_norm)):
            part = qkv[:, heads]
            whole = part.flatten(1) if self.facts.qk_norm == "all" else part
            part.copy_(norm(whole, place, deltas).view(part.shape))

    def _mlp(self, x: Tensor, layer: Layer, deltas: Deltas, lap: Lap) -> Tensor:
        return linear(gated_linear(x, layer.gate_up, deltas, self.facts.activation, lap), layer.down, deltas, lap)

    def _joined(
        self, x: Tensor, y: Tensor, after: Norm | None, before: Norm | None, deltas: Deltas, following: Deltas,
    ) -> tuple[Tensor, Tensor]:
        """x + y, and what the linear behind it reads: that under the norm `before`, where `following` acts. `after` norms y where the facts
        say so. x may be changed."""
        if after is None and before is not None and runs_triton(x):
            normed = torch.empty_like(x)
            residual_norm(y, None, x, self.facts.residual_scale, _weight(before), normed, self.facts.rms_eps)
            return x, changed_norm(normed, x, before, following)
        y = _normed(y, after, deltas)
        x = x + y if self.facts.residual_scale == 1 else x + y * self.facts.residual_scale
        return x, _normed(x, before, following)

    def capped_(self, logits: Tensor) -> Tensor:
        """The logits as the architecture scales and bounds them, in place."""
        if self.facts.logit_divisor != 1:
            logits.div_(self.facts.logit_divisor)
        cap = self.facts.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _cpu_forward(decoder: Decoder) -> CpuForward | None:
    from .cpu_forward import CpuForward, suits_cpu_forward  # it brings numba
    if not suits_cpu_forward(decoder.facts, decoder.layers):
        return None
    return CpuForward(decoder.facts, decoder.embedding, decoder.embedding_scale, decoder.layers, decoder.rope)


def _normed(x: Tensor, place: Norm | None, deltas: Deltas) -> Tensor:
    return x if place is None else norm(x, place, deltas)


def _weight(place: Norm | None) -> Tensor | None:
    return None if place is None else place.rms.weight

"""The decoder on a CPU for steps of replies over packed weights: what `Decoder.forward` computes, in few calls on buffers made once.

Of a small model's step most would be calls and views otherwise: those of buffers are taken once, those of stored keys and values once
for all layers. Sums are fp32, and so is what lies between the products.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.cpu_attention import StoredRuns, kv_targets, stored_runs
from ...kernels.packed_cpu import CpuWeight
from ...kernels.weights import Weight, rows
from ..batch import StepInputs
from .acting import ActiveLora, Lap
from .cpu_buffers import StepBuffers
from .cpu_lora import CpuLora, is_low_rank
from .facts import ModelFacts
from .layers import Layer
from .rope import GLOBAL, RopeTables

MOST_ROWS = 32
"""of a step: above, calls are a small part of it"""


class CpuForward:
    """Over the layers of a decoder, which `suits_cpu_forward` has looked at."""

    def __init__(self, facts: ModelFacts, embedding: Weight, scale: float, layers: Sequence[Layer], rope: RopeTables) -> None:
        """`scale`: what rows of the embedding are multiplied with."""
        self._facts, self._embedding, self._scale, self._layers, self._rope = facts, embedding, scale, layers, rope
        self._buffers: dict[int, StepBuffers] = {}
        self._lora = CpuLora()

    def takes(self, inputs: StepInputs, lora: ActiveLora | None) -> bool:
        """Whether a step is one of replies, whose adapters are low rank and nothing more."""
        count = len(inputs.spans)
        return count <= MOST_ROWS and inputs.ids.shape[0] == count and (lora is None or is_low_rank(lora))

    def forward(self, inputs: StepInputs, caches: Tensor, lora: ActiveLora | None, lap: Lap) -> Tensor:
        """[rows, hidden] behind the last layer, a buffer of the next step too; keys and values are stored in `caches`."""
        facts, count = self._facts, inputs.ids.shape[0]
        if count not in self._buffers:
            self._buffers[count] = StepBuffers(count, facts)
        buffers = self._buffers[count]
        x, normed, packed = buffers.x, buffers.normed, buffers.packed
        torch.mul(rows(self._embedding, inputs.ids), self._scale, out=x)
        cos, sin = self._rope.rows(inputs.rope_rows)[GLOBAL]
        runs = [stored_runs(span, caches, facts.attention_scale or None) for span in inputs.spans]
        targets = kv_targets(caches, inputs.cells)
        added = self._lora.begin(lora, buffers.views) if lora is not None else None
        for index, layer in enumerate(self._layers):
            layer.before_attention.rms.into(x, normed)
            packed.copy_(normed)
            self._product(layer.qkv.weight, packed, buffers.qkv, layer.qkv.bias, lap)
            if added is not None:
                added.add_(index, "qkv_proj", packed, buffers.qkv, lap)
            buffers.turn_(cos, sin)
            targets.write_(index, buffers.kv, buffers.kv_rows)
            lap("other")
            _attend(runs, index, buffers)
            lap("attention")
            self._product(layer.o.weight, buffers.mixed, buffers.sums, layer.o.bias, lap)
            x.add_(buffers.sums)
            if added is not None:
                added.add_(index, "o_proj", buffers.mixed, x, lap)
            layer.before_mlp.rms.into(x, normed)
            packed.copy_(normed)
            self._product(layer.gate_up.weight, packed, buffers.gate_up, layer.gate_up.bias, lap)
            if added is not None:
                added.add_(index, "gate_up_proj", packed, buffers.gate_up, lap)
            buffers.gate_()
            self._product(layer.down.weight, buffers.gated, buffers.sums, layer.down.bias, lap)
            x.add_(buffers.sums)
            if added is not None:
                added.add_(index, "down_proj", buffers.gated, x, lap)
        return x

    def _product(self, weight: CpuWeight, x: Tensor, y: Tensor, bias: Tensor | None, lap: Lap) -> None:
        lap("other")
        product = weight.product(x)
        lap("base matmul")
        y.copy_(product)
        if bias is not None:
            y.add_(bias)


def _attend(runs: Sequence[StoredRuns], index: int, buffers: StepBuffers) -> None:
    for q, stored, out in zip(buffers.q, runs, buffers.mixed_rows, strict=True):
        # torch's kernel takes rows whose scores are all NaN for masked ones and returns zeros; 0 * q adds nothing but NaN
        out.copy_(stored.attend(q, index).add_(q, alpha=0))


def suits_cpu_forward(facts: ModelFacts, layers: Sequence[Layer]) -> bool:
    """Whether steps of replies have calls of their own: all linears are multiplied packed, and the decoder is like llama."""
    if not all(isinstance(linear.weight, CpuWeight) for layer in layers for linear in layer.linears):
        return False
    return (facts.activation == "silu" and facts.residual_scale == 1 and not facts.qk_norm and not facts.attention_softcap
            and not any(facts.windows) and not facts.norms.after_attention and not facts.norms.after_mlp
            and facts.rotary == facts.head_dim and all(layer.rope == GLOBAL for layer in layers)
            and all(layer.before_attention.rms.few_ops for layer in layers))

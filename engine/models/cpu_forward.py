"""The decoder on a CPU for steps of replies over packed weights: what `Decoder.forward` computes, in one compiled call."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.coded_rows import CodedRows
from ...kernels.cpu.products import MOST_ROWS, PRODUCT, scratch, team
from ...kernels.cpu.step import COUNTERS, PARTS, Base, Buffers, Rows, Sizes, decode_step
from ...kernels.cpu.vectors import LANES
from ...kernels.packed_cpu import CpuWeight
from ...kernels.spans import Span
from ...kernels.weights import Weight, rows
from ..batch import StepInputs
from .acting import ActiveLora, Lap, Norm
from .cpu_lora import CpuLora
from .facts import ModelFacts
from .layers import Layer
from .rope import RopeTables


class CpuForward:
    """Over the layers of a decoder, which `suits_cpu_forward` has looked at."""

    def __init__(self, facts: ModelFacts, embedding: Weight, scale: float, layers: Sequence[Layer], rope: RopeTables) -> None:
        """`scale`: what rows of the embedding are multiplied with."""
        self._facts, self._embedding, self._scale, self._layers, self._rope = facts, embedding, scale, layers, rope
        self._sizes = Sizes(facts.heads, facts.kv_heads, np.float32(facts.rms_eps),
                            np.float32(facts.attention_scale or facts.head_dim**-0.5), np.float32(facts.attention_softcap),
                            np.float32(facts.residual_scale), facts.activation == "gelu_tanh", facts.norms.after_attention != "",
                            facts.qk_norm == "head")
        self._base = _base(layers, facts)
        self._lora = CpuLora(facts)

    def takes(self, inputs: StepInputs, lora: ActiveLora | None) -> bool:
        """Whether a step is one of replies, whose adapters are low rank and nothing more."""
        count = len(inputs.spans)
        return count <= MOST_ROWS and inputs.ids.shape[0] == count and (lora is None or self._lora.takes(lora))

    def forward(self, inputs: StepInputs, caches: Tensor, lora: ActiveLora | None, lap: Lap) -> Tensor:
        """fp32 [rows, hidden] behind the last layer; keys and values are stored in `caches`."""
        x = torch.mul(rows(self._embedding, inputs.ids), self._scale)
        cos, sin = (np.stack([table[inputs.rope_rows].numpy() for table in each]) for each in zip(*self._rope.tables, strict=True))
        lengths, run_of, runs = _looked_at(inputs.spans, caches.shape[4])
        seen = Rows(cos, sin, inputs.cells.numpy(), lengths, run_of, runs)
        ranks, most = self._lora.ranks(lora)
        spent = np.zeros(len(PARTS), np.int64)
        counters = np.zeros(COUNTERS * len(self._layers), np.int64)
        stored = caches.view(*caches.shape[:3], -1, caches.shape[5]).numpy()
        lap("other")
        team().run(decode_step, self._sizes, self._base, seen, ranks, stored, self._buffers(x, most, int(lengths.max())), counters, spent)
        lap(dict(zip(PARTS, (spent / max(1, spent.sum())).tolist(), strict=True)))
        return x

    def _buffers(self, x: Tensor, rank_rows: int, tokens: int) -> Buffers:
        facts, count, threads = self._facts, x.shape[0], team().threads
        mixed = facts.heads * facts.head_dim
        most = max(facts.hidden, mixed, facts.intermediate)
        own = ((count, facts.hidden), (count, most // 32), (tokens,))
        widths = (mixed + 2 * facts.kv_heads * facts.head_dim, mixed, facts.hidden, 2 * facts.intermediate, facts.intermediate, rank_rows)
        return Buffers(x.numpy(), *(np.empty((threads, *shape), np.float32) for shape in own), scratch(),
                       *(np.empty((count, width), np.float32) for width in widths))


def _base(layers: Sequence[Layer], facts: ModelFacts) -> Base:
    parts: list[tuple[int, ...]] = []
    linears = np.empty((len(layers), 4, 2), np.int64)
    outputs = sum(linear.weight.shape[0] for linear in layers[0].linears)
    biases, has_bias = np.zeros((len(layers), outputs), np.float32), np.zeros((len(layers), 4), np.bool_)
    for index, layer in enumerate(layers):
        start = 0
        for number, linear in enumerate(layer.linears):
            linears[index, number] = len(parts), len(parts) + len(linear.weight.parts)
            first = 0
            for part in linear.weight.parts:
                parts.append((*part.place, first))
                first += part.shape[0]
            if linear.bias is not None:
                biases[index, start:start + first], has_bias[index, number] = linear.bias.numpy(), True
            start += first
    norms = _norms([(layer.before_attention, layer.before_mlp, layer.after_attention, layer.after_mlp) for layer in layers], facts.hidden)
    return Base(PRODUCT, np.array(parts, np.int64), linears, biases, has_bias, norms,
                _norms([(layer.q_norm, layer.k_norm) for layer in layers], facts.head_dim),
                np.array([layer.rope for layer in layers], np.int64), np.array([layer.window for layer in layers], np.int64))


def _norms(places: Sequence[Sequence[Norm | None]], width: int) -> np.ndarray:
    """fp32 [layers, norms of a layer, width], zeros for those that there are not."""
    return np.array([[np.zeros(width, np.float32) if place is None else place.rms.weight.numpy() for place in layer] for layer in places])


def _looked_at(spans: Sequence[Span], block_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, run_of and runs of `Rows`, of spans of one row."""
    runs = [(first * block_tokens, blocks * block_tokens) for span in spans for first, blocks in span.runs]
    return (np.array([span.length for span in spans], np.int64), np.cumsum([0, *(len(span.runs) for span in spans)], dtype=np.int64),
            np.array(runs, np.int64))


def suits_cpu_forward(facts: ModelFacts, layers: Sequence[Layer]) -> bool:
    """Whether steps of replies are computed so: all linears are multiplied packed, and norms stand before attention and MLP at least."""
    weights = [linear.weight for layer in layers for linear in layer.linears]
    if not all(isinstance(weight, CpuWeight) and all(isinstance(part, CodedRows) for part in weight.parts) for weight in weights):
        return False
    return (facts.norms.before_attention != "" and facts.norms.before_mlp != "" and facts.qk_norm != "all"
            and (facts.norms.after_attention == "") == (facts.norms.after_mlp == "") and facts.head_dim % LANES == 0
            and all(place.rms.weight.dtype == torch.float32 for layer in layers for place in layer.norms))

"""The forward of a decode step in a few launches a layer, over buffers that are made once: what a CUDA graph can hold.

embed -> per layer: qkv | attention | o + residual | gate and up | down + residual -> head. A norm before a linear costs nothing: what makes
the residual stream also makes it ready for the linear that reads it next (see kernels/decode_linear.py). In fp16, whose range is small, and
where norms stand after attention and MLP, the residual stream is normed by a launch of its own.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.decode_attention import AttentionWork, DecodeRows, Heads, decode_attention
from ...kernels.decode_linear import DecodeWork, Glu, Residual, RowSquares, decode_linear, square_parts
from ...kernels.embed_rows import embed_rows
from ...kernels.packed_linear import packed_square_parts
from ...kernels.rank_pages import RankRows
from ...kernels.repacked import RepackedWeight
from ...kernels.residual_norm import residual_norm
from ...kernels.stamps import Stamps
from ...kernels.weights import Weight, rows
from ..slots import ADDED_TOKENS
from .acting import NO_DELTAS, Linear, Norm
from .decoder import Decoder
from .facts import linear_layout
from .layers import NO_ROPE, Layer
from .own_rows import OwnRows, OwnRowsForward

OPS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down", "lm_head": "head"}
"""what the stamps call a linear"""


NO_RANKS: Sequence[Mapping[str, RankRows]] = ()


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What a forward reads; all of it stays where it is from step to step. Rows at position -1 are empty."""

    ids: Tensor
    """[rows] int32"""
    places: DecodeRows
    ranks: Sequence[Mapping[str, RankRows]]
    """what adapters add, by layer and name of the linear, that of the head behind the last layer; NO_RANKS without any"""
    own: OwnRows | None = None
    """what else they change on some rows"""


class DecodeForward:
    """The decode steps of a decoder, of up to `most` rows; `caches` as Decoder.kv_cache makes them. Of its matrices none but the embedding
    may be a PackedWeight."""

    def __init__(self, decoder: Decoder, caches: Tensor, most: int, stamps: Stamps) -> None:
        facts = self._facts = decoder.facts
        self._decoder, self._caches, self._stamps = decoder, caches, stamps
        self._folded = decoder.dtype != torch.float16 and not facts.norms.after_attention
        self._heads = [_heads(layer, decoder) for layer in decoder.layers]
        self._nexts = [*(layer.before_attention for layer in decoder.layers[1:]), decoder.norm]
        """of each layer, the norm before what reads the residual stream behind it"""
        self._stream, self._x, self._y = (self._buffer(most, facts.hidden) for _ in range(3))
        self.base_rows = self._y
        """of the embedding, for the tokens of a step: at its beginning, and where the embedding is packed"""
        self._every = torch.arange(most, dtype=torch.int32, device=decoder.device)
        self._qkv = self._buffer(most, facts.q_out + 2 * facts.kv_out)
        self._mixed = self._buffer(most, facts.q_out)
        self._inner = self._buffer(most, facts.intermediate)
        self.columns = facts.vocab + ADDED_TOKENS
        self.logits = self._buffer(most, self.columns)
        slices = {kind: len(modules) for kind, modules in linear_layout(facts).items()} | {"lm_head": 1}
        linears = [(linear, index) for index, layer in enumerate(decoder.layers) for linear in layer.linears]
        linears.append((decoder.head, facts.layers))
        self._linears = DecodeWork(
            most, [(linear.weight.shape[1], linear.weight.shape[0], slices[linear.name]) for linear, _ in linears],
            decoder.dtype, decoder.device, [linear.weight for linear, _ in linears if isinstance(linear.weight, RepackedWeight)])
        self._lanes = {(linear.name, index): self._linears.lane(place) for place, (linear, index) in enumerate(linears)}
        parts = max(_square_parts(linear.weight) for layer in decoder.layers for linear in (layer.o, layer.down))
        self._squares = RowSquares(torch.zeros(parts, most, device=decoder.device), facts.hidden, facts.rms_eps)
        self._own_rows = OwnRowsForward(decoder, most, self._stream, self._x, self._squares if self._folded else None)
        self._attention = AttentionWork(most, self._heads[0], decoder.device)

    @torch.inference_mode()
    def __call__(self, step: DecodeStep) -> Tensor:
        """Logits [rows, `columns`] in the dtype of the base, anything finite for tokens that a row lacks; keys and values of the rows are
        stored."""
        facts, layers = self._facts, self._decoder.layers
        self._linears.begin()
        self._attention.begin()
        count = step.ids.shape[0]
        qkv, mixed, inner, logits = (buffer[:count] for buffer in (self._qkv, self._mixed, self._inner, self.logits))
        x = self._embed(step, layers[0].before_attention)
        own = step.own
        if own is not None:
            self._own_rows.begin(own, layers[0].before_attention)
        for index, (layer, cache, heads, after) in enumerate(zip(layers, self._caches, self._heads, self._nexts, strict=True)):
            self._linear(x, layer.qkv, qkv, step, index)
            if own is not None:
                self._own_rows.change(x, qkv, layer.qkv, own, index)
            if facts.qk_norm == "all":
                self._decoder.norm_heads_(qkv.view(count, -1, facts.head_dim), layer, NO_DELTAS)
            decode_attention(qkv, cache, mixed, step.places, heads, self._attention, self._stamps.at("attention"))
            x = self._join(mixed, layer.o, step, index, layer.after_attention, layer.before_mlp)
            if own is None or own.gates != "all":
                self._linear(x, layer.gate_up, inner, step, index, facts.activation)
            if own is not None and own.gates:
                stamp = self._stamps.at(OPS["gate_up_proj"]) if own.gates == "all" else None
                self._own_rows.gate(x, layer.gate_up, own, index, facts.activation, _rank(step, layer.gate_up, index), inner, stamp)
            x = self._join(inner, layer.down, step, index, layer.after_mlp, after)
        self._linear(x, self._decoder.head, logits[:, : facts.vocab], step, len(layers))
        if own is not None:
            self._own_rows.head(x, logits, own)
        return self._decoder.capped_(logits)

    def _embed(self, step: DecodeStep, before: Norm | None) -> Tensor:
        """The residual stream of the rows' tokens, ready for the first linear."""
        table, scale, ids = self._decoder.embedding, self._decoder.embedding_scale, step.ids
        stream, x, y = (buffer[: ids.shape[0]] for buffer in (self._stream, self._x, self._y))
        if not self._folded or not isinstance(table, Tensor):
            y.copy_(rows(table, ids))
            table, ids = y, self._every[: ids.shape[0]]
        if self._folded:
            embed_rows(ids, table, x, Residual(stream, before.rms.weight, self._squares, scale))
            return x
        stream.zero_()
        return self._add(y, None, scale, before)

    def _linear(self, x: Tensor, linear: Linear, out: Tensor, step: DecodeStep, layer: int, glu: Glu = "") -> None:
        norm = self._squares if self._folded else None
        decode_linear(x, linear.weight, linear.bias, out, norm=norm, glu=glu, rank=_rank(step, linear, layer),
                      work=self._lanes[linear.name, layer], stamp=self._stamps.at(OPS[linear.name]))

    def _join(self, x: Tensor, linear: Linear, step: DecodeStep, layer: int, after: Norm | None, before: Norm | None) -> Tensor:
        """Add the linear of `x`, normed by `after`, to the residual stream. Returns that normed by `before`, for the next linear."""
        scale = self._facts.residual_scale
        out = (self._x if self._folded else self._y)[: x.shape[0]]
        residual = Residual(self._stream[: x.shape[0]], before.rms.weight, self._squares, scale) if self._folded else None
        decode_linear(x, linear.weight, linear.bias, out, residual=residual, rank=_rank(step, linear, layer),
                      work=self._lanes[linear.name, layer], stamp=self._stamps.at(OPS[linear.name]))
        joined = out if self._folded else self._add(out, after, scale, before)
        if step.own is not None:
            self._own_rows.join(x, out, linear, step.own, layer, after, before)
        return joined

    def _add(self, y: Tensor, after: Norm | None, scale: float, before: Norm | None) -> Tensor:
        stream, x = self._stream[: y.shape[0]], self._x[: y.shape[0]]
        residual_norm(y, _weight(after), stream, scale, _weight(before), x, self._facts.rms_eps)
        return x

    def _buffer(self, count: int, width: int) -> Tensor:
        return torch.zeros(count, width, dtype=self._decoder.dtype, device=self._decoder.device)


def _heads(layer: Layer, decoder: Decoder) -> Heads:
    facts = decoder.facts
    cos, sin = (None, None) if layer.rope == NO_ROPE else decoder.rope.tables[layer.rope]
    q_norm, k_norm = (_weight(place) if facts.qk_norm == "head" else None for place in (layer.q_norm, layer.k_norm))
    return Heads(facts.heads, facts.kv_heads, facts.head_dim, facts.attention_scale or facts.head_dim**-0.5, facts.attention_softcap,
                 layer.window, cos, sin, q_norm, k_norm, facts.rms_eps)


def _square_parts(weight: Weight) -> int:
    if isinstance(weight, RepackedWeight):
        return packed_square_parts(weight)
    return square_parts(weight.shape[1], weight.shape[0], weight.dtype)


def _rank(step: DecodeStep, linear: Linear, layer: int) -> RankRows | None:
    return step.ranks[layer].get(linear.name) if step.ranks else None


def _weight(place: Norm | None) -> Tensor | None:
    return place.rms.weight if place is not None else None

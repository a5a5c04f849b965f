"""A decode step's rows that adapters change by more than rank rows: their launches behind those of all rows."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ...kernels.decode_linear import DecodeWork, Glu, RowSquares, decode_linear
from ...kernels.embedding_rows import EmbeddingRows
from ...kernels.head_rows import HeadRows
from ...kernels.late_ranks import late_ranks
from ...kernels.rank_pages import RankRows
from ...kernels.repacked import RepackedWeight
from ...kernels.row_changes import NormRows, RowChanges, RowStream, begin_rows_, change_rows_, gate_rows, join_rows_
from ...kernels.stamps import Stamp
from ..dora_rows import Place
from .acting import Linear, Norm
from .decoder import Decoder

Gates = Literal["", "some", "all"]


class ProfileVectors:
    """Gains, shifts and norm weights of `count` profiles at all places of a decoder, in memory that stays where it is."""

    def __init__(self, decoder: Decoder, count: int) -> None:
        linears = {(index, linear.name): linear for index, layer in enumerate(decoder.layers) for linear in layer.linears}
        linears[decoder.facts.layers, "lm_head"] = decoder.head
        norms = {(index, norm.name): norm for index, layer in enumerate(decoder.layers) for norm in layer.norms
                 if norm not in (layer.q_norm, layer.k_norm)}
        norms[decoder.facts.layers, decoder.norm.name] = decoder.norm
        sizes = [linear.weight.shape[0] for linear in linears.values()]
        widths = [norm.rms.weight.shape[0] for norm in norms.values()]
        self.count = count
        self._gains, self._shifts = (torch.zeros(count, sum(sizes), device=decoder.device) for _ in range(2))
        self._changes = torch.zeros(count, sum(widths), device=decoder.device)
        self.linears: Mapping[Place, tuple[Tensor, Tensor]] = dict(
            zip(linears, zip(self._gains.split(sizes, 1), self._shifts.split(sizes, 1), strict=True), strict=True))
        """(gains, shifts) fp32 [count, d_out] by (layer, fused linear)"""
        self.norms: Mapping[Place, Tensor] = dict(zip(norms, self._changes.split(widths, 1), strict=True))
        """fp32 [count, width] by (layer, norm)"""
        self._weights = {norm: NormRows(norm.rms.weight, self.norms[place]) for place, norm in norms.items()}

    def clear(self, index: int) -> None:
        """The profile at `index` changes nothing."""
        self._gains[index], self._shifts[index], self._changes[index] = 1.0, 0.0, 0.0

    def norm(self, place: Norm | None) -> NormRows | None:
        return None if place is None else self._weights[place]


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Which rows of a step have what; all of it stays where it is from step to step."""

    which: Tensor
    """int32 [rows]: 0, or the number of the row's profile, counted from 1"""
    gated: Tensor
    """int32 [rows]: the same, for rows whose profile changes gate or up"""
    embedded: Tensor
    """int32 [rows]: whether `embeddings` has terms for the row"""
    embeddings: EmbeddingRows
    vectors: ProfileVectors
    heads: HeadRows
    gates: Gates
    """which rows are `gated`: where it is some, gate and up are computed for all rows, and again for these"""
    late: Sequence[Mapping[str, RankRows]]
    """what follows a DoRA in the mix of a row, as DecodeStep.ranks; empty where nothing does"""


class OwnRowsForward:
    """The launches of the rows that have a profile, of steps of up to `most` rows.

    Their residual stream lies apart. Where the others' is added to inside a linear, they leave zero there, so that what the linear adds
    is its product.
    """

    def __init__(self, decoder: Decoder, most: int, shared: Tensor, x: Tensor, squares: RowSquares | None) -> None:
        """`shared`, `x` [most, hidden]: of all rows, the residual stream and what the next linear reads; `squares` of the stream where
        linears add to it themselves."""
        self._decoder, self._most, self._squares = decoder, most, squares
        self._shared, self._x = shared, x
        self._stream, self._embedded = torch.zeros_like(shared), torch.zeros_like(shared)

    def begin(self, own: OwnRows, before: Norm | None) -> None:
        """Behind the beginning of all rows."""
        if own.gates:
            self._gate_work.begin()
        embedded = self._embedded[: len(own.which)]
        own.embeddings.run(embedded)
        begin_rows_(own.which, own.embedded, embedded, self._decoder.embedding_scale, own.vectors.norm(before), self._to(own))

    def change(self, x: Tensor, y: Tensor, linear: Linear, own: OwnRows, layer: int) -> None:
        """Behind `linear`, which made `y` of `x`, with a norm where there is one before it."""
        change_rows_(y, linear.bias, self._changes(x, linear, own, layer, self._squares))

    def head(self, x: Tensor, logits: Tensor, own: OwnRows) -> None:
        """Behind the head, which made the first of `logits`."""
        head = self._decoder.head
        own.heads.run_(x, self._squares, logits)
        self.change(x, logits[:, : head.weight.shape[0]], head, own, self._decoder.facts.layers)

    def join(
        self, x: Tensor, y: Tensor, linear: Linear, own: OwnRows, layer: int, after: Norm | None, before: Norm | None,
    ) -> None:
        """Behind the addition of all rows' `linear` of `x` to the stream; `y` is what it made, where that is not the stream."""
        scale, added = self._decoder.facts.residual_scale, self._squares is not None
        source, divisor = (self._shared[: len(y)], scale) if added else (y, 1.0)
        changes = self._changes(x, linear, own, layer, None)
        join_rows_(source, divisor, linear.bias, changes, own.vectors.norm(after), scale, own.vectors.norm(before),
                   self._to(own))

    def gate(
        self, x: Tensor, linear: Linear, own: OwnRows, layer: int, glu: Glu, rank: RankRows | None, out: Tensor, stamp: Stamp | None,
    ) -> None:
        """Behind gate and up of the rows that are not `gated`, if there are any: those of the others, changed before the gate opens."""
        y = self._gates[: len(x)]
        if isinstance(linear.weight, RepackedWeight):
            self._unpacked(x, linear, own, rank, y)
        else:
            decode_linear(x, linear.weight, linear.bias, y, norm=self._squares, rank=rank, work=self._gate_work.lane(layer), stamp=stamp)
        gate_rows(y, linear.bias, replace(self._changes(x, linear, own, layer, self._squares), which=own.gated), glu, out)

    def _unpacked(self, x: Tensor, linear: Linear, own: OwnRows, rank: RankRows | None, y: Tensor) -> None:
        """`linear` of x where its rows lie as a gate reads them: by numbers made of them. It multiplies as many rows as there may be, lest
        their number shows in the bits of one."""
        product = linear.weight.linear(self._x, None)[: len(x)].float()
        if rank is not None:
            added = self._late[: product.numel()].view(product.shape)
            late_ranks(x, rank, None, own.gated, added)
            product += added
        if self._squares is not None:
            product *= torch.rsqrt(self._squares.parts.sum(0)[: len(x), None] / self._squares.width + self._squares.eps)
        y.copy_(product if linear.bias is None else product.add_(linear.bias))

    def _changes(self, x: Tensor, linear: Linear, own: OwnRows, layer: int, norm: RowSquares | None) -> RowChanges:
        late = None
        if own.late and (rank := own.late[layer].get(linear.name)) is not None:
            late = self._late[: len(x) * linear.weight.shape[0]].view(len(x), -1)
            late_ranks(x, rank, norm, own.which, late)
        return RowChanges(own.which, *own.vectors.linears[layer, linear.name], late)

    def _to(self, own: OwnRows) -> RowStream:
        rows = len(own.which)
        return RowStream(self._stream[:rows], self._shared[:rows], self._x[:rows], self._squares, self._decoder.facts.rms_eps)

    @cached_property
    def _late(self) -> Tensor:
        widest = max(linear.weight.shape[0] for linear in (self._decoder.head, *self._decoder.layers[0].linears))
        return torch.zeros(self._most * widest, device=self._decoder.device)

    @cached_property
    def _gates(self) -> Tensor:
        return self._shared.new_zeros(self._most, 2 * self._decoder.facts.intermediate)

    @cached_property
    def _gate_work(self) -> DecodeWork:
        facts = self._decoder.facts
        return DecodeWork(self._most, [(facts.hidden, 2 * facts.intermediate, 2)] * facts.layers, self._decoder.dtype, self._decoder.device)

"""What the adapters of a step do at each place of a decoder: under its linears, at its norms, its embedding, its head.

The decoder calls these and knows no adapter; without an active one each is the base's own operation and nothing else.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...kernels.decode_linear import Glu
from ...kernels.dora import scale_rows
from ...kernels.gate_tiles import gate_tiles
from ...kernels.lora import LoraLinear, LoraStep, add_vectors_, lora_expand_, lora_shrink, vector_weights
from ...kernels.lora_tiles import Shrunk, lora_expand_tiles_
from ...kernels.norm import RmsNorm
from ...kernels.weights import Weight, base_linear, rows
from ..active import Phase, RowsActing, Span, rows_acting
from ..dora_rows import Place
from ..paged_linears import PagedLinear
from ..routing import Routing, Vectors
from ..slots import VocabularyPart
from .acting_vocabulary import acting_embedding, acting_head

Lap = Callable[[str | Mapping[str, float]], None]
"""LapTimer.lap"""


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
    """What the adapters of a step bring, and on which of its rows each of them acts."""

    routing: Routing
    body: RowsActing
    """every token of the step"""
    head: RowsActing | None
    """the sampled rows; None when no adapter changes the head or the last norm"""

    def at_layer(self, index: int) -> Deltas:
        return Deltas(self.routing.layers[index], self.body, index, self.routing.vectors[index])

    def at_head(self) -> Deltas:
        """For the head and the last norm on the sampled rows."""
        if self.head is None:
            return NO_DELTAS
        routing, last = self.routing, len(self.routing.layers) - 1
        return Deltas(routing.layers[last], self.head, last, routing.vectors[last], routing.head)


def active_lora(routing: Routing, spans: Sequence[Span], sampled: Sequence[Span]) -> ActiveLora:
    """`spans`: the tokens of a step; `sampled`: those whose logits are wanted."""
    return ActiveLora(routing, rows_acting(routing, spans), rows_acting(routing, sampled) if routing.changes_head and sampled else None)


@dataclass(frozen=True, slots=True)
class Deltas:
    """ActiveLora at one layer, or at the head."""

    linears: Mapping[str, LoraLinear | PagedLinear]
    acting: RowsActing | None
    layer: int = -1
    vectors: Vectors | None = None
    head: tuple[tuple[int, VocabularyPart], ...] = ()


NO_DELTAS = Deltas({}, None)


def embed(ids: Tensor, weight: Weight, lora: ActiveLora | None) -> Tensor:
    """Rows [T, hidden] of the embedding for `ids` [T], before the architecture scales them."""
    if lora is None or not lora.routing.embedding:
        return rows(weight, ids)
    return acting_embedding(ids, weight, lora.routing, lora.body)


def norm(x: Tensor, layer_norm: Norm, deltas: Deltas) -> Tensor:
    """`layer_norm` of x [T, ..., d]. Semantics: x / rms(x) * (weight + sum over adapters of row weight * (trained weight - weight))."""
    return changed_norm(layer_norm.rms(x), x, layer_norm, deltas)


def changes_norm(layer_norm: Norm, deltas: Deltas) -> bool:
    """Whether an adapter has trained its weight."""
    return deltas.acting is not None and deltas.vectors is not None and layer_norm.name in deltas.vectors.norms


def changed_norm(y: Tensor, x: Tensor, layer_norm: Norm, deltas: Deltas) -> Tensor:
    """`norm` of x, out of what it is without adapters, y."""
    if not changes_norm(layer_norm, deltas):
        return y
    trained = deltas.vectors.norms[layer_norm.name]
    change = vector_weights(deltas.acting.weights, trained) @ trained.values.float()
    change = change.view(change.shape[0], *[1] * (x.dim() - 2), change.shape[1])
    return (y.float() + layer_norm.rms.normalised(x) * change).to(y.dtype)


def linear(x: Tensor, base: Linear, deltas: Deltas, lap: Lap) -> Tensor:
    """Semantics: y = x W^T + bias + (row_weights * (x A^T)) B. Without an adapter here it is the base product and nothing else.

    A row whose mix holds DoRA: y = bias + g * (x W^T + (row_weights * (x A^T)) B), g the gains of that DoRA, what follows it in the
    mix added behind; a mix of several is taken in its order, as PEFT takes its active adapters.
    """
    y, left = begun_linear(x, base, deltas, lap)
    if left is not None:
        lora_expand_tiles_(y, left)
        lap("expand")
    return y


def gated_linear(x: Tensor, base: Linear, deltas: Deltas, glu: Glu, lap: Lap) -> Tensor:
    """Semantics: act(g) * u, g and u the halves of `linear`."""
    y, left = begun_linear(x, base, deltas, lap)
    return gate_tiles(y, glu, left)


def begun_linear(x: Tensor, base: Linear, deltas: Deltas, lap: Lap) -> tuple[Tensor, Shrunk | None]:
    """`linear` but for what rank rows in pages add, where that comes last."""
    lap("other")
    acting = deltas.acting
    added = deltas.linears.get(base.name) if acting is not None else None
    ahead = added.shrink(x, acting.step) if isinstance(added, PagedLinear) and acting.step is not None else None
    y = base_linear(x, base.weight, base.bias)
    lap("base matmul")
    if acting is None:
        return y, None
    if deltas.head:
        y = acting_head(y, x, deltas.head, acting.weights)
    trained = deltas.vectors.biases.get(base.name) if deltas.vectors is not None else None
    if added is not None:
        for phase in acting.phases:
            _pass_dora_(y, x, base.bias, added, phase, (deltas.layer, base.name), lap)
        if ahead is not None and added.behind is None and added.bias is None and trained is None:
            lap("shrink")
            return y, ahead
        if acting.step is not None:
            _add_(y, x, added, acting.step, lap, ahead)
    if trained is not None:
        add_vectors_(y, acting.weights, trained)
    return y, None


def _add_(y: Tensor, x: Tensor, added: LoraLinear | PagedLinear, step: LoraStep, lap: Lap, ahead: Shrunk | None = None) -> None:
    """`ahead`: the shrink of `added`, if it was begun."""
    if isinstance(added, PagedLinear):
        shrunk = ahead or added.shrink(x, step)
        lap("shrink")
        lora_expand_tiles_(y, shrunk)
        if added.behind is not None:
            _add_(y, x, added.behind, step, lap)
    else:
        h = lora_shrink(x, added.a, step.row_weights(added))
        lap("shrink")
        lora_expand_(y, h, added.slices)
    if added.bias is not None:
        add_vectors_(y, step.weights, added.bias)
    lap("expand")


def _pass_dora_(
    y: Tensor, x: Tensor, bias: Tensor | None, added: LoraLinear | PagedLinear, phase: Phase, place: Place, lap: Lap,
) -> None:
    """One phase of the rows that have it; the other rows of `y` are not touched."""
    ours, of_x = (y, x) if phase.rows is None else (y.index_select(0, phase.rows), x.index_select(0, phase.rows))
    _add_(ours, of_x, added, phase.step, lap)
    for use in phase.uses:
        gains = use.gains.get(place)
        if gains is None:
            continue
        ruled = ours[:, : gains.shape[0]]  # a head is wider beside a request with added tokens
        if use.rows is None:
            ruled.copy_(scale_rows(ruled, gains, bias))
        else:
            ruled.index_copy_(0, use.rows, scale_rows(ruled.index_select(0, use.rows), gains, bias))
    if phase.rows is not None:
        y.index_copy_(0, phase.rows, ours)

"""What an adapter is on the device, and the slots that hold it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

from torch import Tensor

from .dora_rows import DoraRows
from .models.facts import ModelFacts, linear_layout
from .page_pool import AdapterPages

ADDED_TOKENS = 256
"""that a step under a graph has room for"""


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One adapter's share of one fused linear. `a` [k, d_in], slice-major; `b[i]` [k_i, d_out_i], scaling folded in, or None."""

    a: Tensor
    b: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """What an adapter does to a matrix with a row for each token: the embedding, or the head.

    A LoRA is here for the embedding only, that of the head is a FusedPart. `rows` of `ids` (int64, ascending) are trained rows: the
    rows themselves for the embedding, for the head their differences from the base.
    """

    a: Tensor | None = None
    """[rows, r]"""
    b: Tensor | None = None
    """[r, hidden], scaling folded in"""
    replaced: Tensor | None = None
    """[rows, hidden]: stands for the base's rows, with added tokens behind them"""
    ids: Tensor | None = None
    rows: Tensor | None = None
    """[n, hidden]"""
    size: int = 0
    """rows of the matrix that this reaches: the last it knows, and one"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.a, self.b, self.replaced, self.ids, self.rows) if tensor is not None)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SlotContent:
    """One adapter on the device. Parts by (layer, fused linear); lm_head by (number of layers, "lm_head")."""

    parts: Mapping[tuple[int, str], FusedPart]
    """what of its low-rank factors is not in pages"""
    nbytes: int
    rank: int
    lora_biases: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)
    """scaling * bias of lora_B, [d_out] of the fused linear"""
    biases: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)
    """trained biases of the base minus the base's, [d_out] of the fused linear"""
    norms: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)
    """trained norm weights minus the base's, by layer and name in it; the last norm by (number of layers, "norm")"""
    embedding: VocabularyPart | None = None
    head: VocabularyPart | None = None
    dora: DoraRows | None = None
    pages: AdapterPages | None = None

    def with_pages(self, pages: AdapterPages) -> SlotContent:
        return replace(self, pages=pages, nbytes=self.nbytes + pages.nbytes)

    @property
    def changed_linears(self) -> frozenset[tuple[int, str]]:
        """Where it has more than rank rows."""
        return frozenset((*self.biases, *self.lora_biases, *(self.dora.places if self.dora else ())))

    def low_rank(self, layers: int) -> frozenset[tuple[int, str]]:
        """Where it has rank rows in pages, of a base with `layers`."""
        ranks = self.pages.ranks if self.pages is not None else {}
        return frozenset((layers if kind == "lm_head" else layer, kind)
                         for kind, found in ranks.items() for layer in found.any(1).nonzero()[0].tolist())

    @property
    def has_vectors(self) -> bool:
        """Gains or shifts of a linear, or norm weights."""
        return bool(self.biases or self.lora_biases or self.norms or self.dora and self.dora.of_linears)

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but rank rows in pages."""
        return not (self.has_vectors or self.embedding or self.head or self.parts)

    def beyond_graphs(self, vocab: int) -> str:
        """What it has that no captured step of a base with `vocab` words reads, "" when that is nothing."""
        head = self.head
        most = max((part.size for part in (self.embedding, head) if part is not None), default=0)
        found = {f"more than {ADDED_TOKENS} added tokens": most > vocab + ADDED_TOKENS,
                 "fewer head rows than the base": head is not None and head.replaced is not None and len(head.replaced) < vocab,
                 "trained norms of heads": any(name.endswith(("q_norm", "k_norm")) for _, name in self.norms),
                 "low-rank factors outside pages": self.parts}
        return " and ".join(what for what, part in found.items() if part)


@dataclass(slots=True)
class Slot:
    """A place for one adapter. `generation` grows with every content, so (index, generation) names a content for ever."""

    index: int
    adapter: str = ""
    content: SlotContent | None = None
    generation: int = 0
    last_used: float = 0.0

    def fill(self, adapter: str, content: SlotContent) -> None:
        self.adapter, self.content = adapter, content
        self.generation += 1
        self.last_used = monotonic()

    def clear(self) -> SlotContent | None:
        """Free the place; what was in it."""
        content = self.content
        self.adapter, self.content = "", None
        return content


def fused_modules(facts: ModelFacts) -> dict[tuple[int, str], tuple[str, ...]]:
    """(layer, fused linear) -> canonical names of its modules in order; lm_head last, by (layers, "lm_head")."""
    table = {
        (layer, fused): tuple(f"layers.{layer}.{module}" for module in modules)
        for layer in range(facts.layers) for fused, modules in linear_layout(facts).items()
    }
    table[facts.layers, "lm_head"] = ("lm_head",)
    return table

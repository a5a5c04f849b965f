"""What the adapters active in a batch bring, laid end to end: all that the places of a forward read."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.lora import ExpandSlice, LoraLinear, LoraStep, RowVectors
from ..kernels.lora_tiles import SideStream, cut_tiles
from ..kernels.rank_pages import PAGE_ROWS
from .dora_rows import DoraRows
from .page_lists import KindLists, PageLists, list_obstacle, page_lists
from .page_loads import PageLoad
from .page_pool import AdapterPages, PagePool
from .paged_linears import Layouts, PagedLinear
from .slots import FusedPart, Slot, SlotContent, VocabularyPart


@dataclass(frozen=True, slots=True)
class Vectors:
    """What is added to the biases and norm weights of a layer, by fused linear and by name of the norm."""

    biases: Mapping[str, RowVectors]
    norms: Mapping[str, RowVectors]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Routing:
    """One composition of adapters. `layers[i]` has the fused linears of layer i that any of them changes; the head comes last."""

    columns: Mapping[str, int]
    """adapter name -> its column of W"""
    layers: tuple[Mapping[str, LoraLinear | PagedLinear], ...]
    vectors: tuple[Vectors | None, ...]
    """by layer, then those of the last norm"""
    embedding: tuple[tuple[int, VocabularyPart], ...]
    """(column of W, what that adapter does to the embedding)"""
    head: tuple[tuple[int, VocabularyPart], ...]
    dora: Mapping[str, DoraRows]
    """by adapter name, those that have any"""
    base_vocab: int
    """rows of embedding and head without them"""
    column_maps: Layouts
    device: torch.device
    max_rank: int
    lists: Mapping[str, KindLists]
    """the pages that act, by kind of fused linear"""
    page_lists: PageLists
    contents: Mapping[str, SlotContent]
    """by adapter name"""
    obstacle: str
    """why a step under a graph cannot read them, "" when it can"""
    copied_bytes: int
    """of its tensors that are no slot's own: what several adapters have at one place, copied end to end"""

    @property
    def plain(self) -> bool:
        """Whether all that they bring is rank rows in pages."""
        return all(content.is_plain for content in self.contents.values())

    @property
    def changes_head(self) -> bool:
        return bool(self.layers[-1] or self.vectors[-1] or self.head)

    def step(self, weights: Tensor) -> LoraStep:
        """The weights W [tokens, adapters] fp32 (see `mix.fill_weights`), moved to the device of the factors."""
        if not self.lists:
            return LoraStep(weights.to(self.device, non_blocking=True), self.column_maps)
        tiles = cut_tiles(weights.numpy(), self.page_lists.different, self.device)
        return LoraStep(tiles.weights, self.column_maps, tiles)


MOST_COPIED = 2
"""compositions that are kept of adapters laid end to end; it bounds their memory"""
MOST_IN_PAGES = 16
"""of adapters in pages, which take next to nothing"""


class RoutingCache:
    """The last compositions, by the contents of their slots: a change of scales or of tokens builds nothing."""

    def __init__(self, layers: int, slices: Mapping[tuple[int, str], Sequence[int]], device: torch.device,
                 pool: PagePool | None = None) -> None:
        """`slices`: (layer, fused linear) -> output sizes of its modules. `pool` holds the pages of the contents that have some."""
        self._layers, self._slices, self._device, self._pool = layers, slices, device, pool
        self._size = MOST_COPIED if pool is None else MOST_IN_PAGES
        self._side = SideStream(device) if pool is not None and device.type == "cuda" else None
        self._vocab = slices[layers, "lm_head"][0]
        self._cached: OrderedDict[tuple[tuple[int, int], ...], Routing] = OrderedDict()

    def get(self, slots: Sequence[Slot]) -> Routing:
        """The composition of the adapters in `slots` (at least one, all filled), in this order."""
        key = tuple((slot.index, slot.generation) for slot in slots)
        routing = self._cached.get(key)
        if routing is None:
            routing = self._cached[key] = self._compose(slots)
            while len(self._cached) > self._size:
                self._cached.popitem(last=False)
        self._cached.move_to_end(key)
        return routing

    def rehearsal(self) -> Routing | None:
        """One adapter with an empty page in every linear of the layers; None where there are no pages."""
        if self._pool is None:
            return None
        kinds = {kind: shape for kind, shape in self._pool.shapes.items() if kind != "lm_head"}
        ranks = {kind: np.full((len(shape.modules), len(shape.ends)), PAGE_ROWS) for kind, shape in kinds.items()}
        slot = Slot(-1)
        slot.fill("", SlotContent({}, 0, PAGE_ROWS, pages=AdapterPages(dict.fromkeys(kinds, (0,)), ranks, 0, PageLoad())))
        return self._compose([slot])

    @property
    def copied_bytes(self) -> int:
        """What the kept compositions take beside the slots."""
        return sum(routing.copied_bytes for routing in self._cached.values())

    def forget(self, slot: int) -> None:
        """Free every composition that holds a content of the slot with this index."""
        for key in [key for key in self._cached if any(index == slot for index, _ in key)]:
            del self._cached[key]

    def _compose(self, slots: Sequence[Slot]) -> Routing:
        contents = [slot.content for slot in slots if slot.content is not None]
        by_name = {slot.adapter: content for slot, content in zip(slots, contents, strict=True)}
        layouts = Layouts(self._device)
        places: list[dict[str, LoraLinear]] = [{} for _ in range(self._layers + 1)]
        for (layer, fused), sizes in self._slices.items():
            parts = [(column, content.parts[layer, fused]) for column, content in enumerate(contents) if (layer, fused) in content.parts]
            if parts:
                places[layer][fused] = self._compose_linear(parts, sizes, layouts, self._added_bias(contents, (layer, fused)))
        vectors = tuple(self._compose_vectors(layer, contents) for layer in range(self._layers + 1))
        used = _used(places, vectors)
        lists = page_lists([content.pages for content in contents], self._pool.shapes) if self._pool is not None else {}
        different = PageLists(lists)
        return Routing(
            columns={slot.adapter: column for column, slot in enumerate(slots)},
            layers=tuple(self._with_paged(contents, places, lists, different)),
            vectors=vectors,
            embedding=tuple((column, content.embedding) for column, content in enumerate(contents) if content.embedding),
            head=tuple((column, content.head) for column, content in enumerate(contents) if content.head),
            dora={name: content.dora for name, content in by_name.items() if content.dora},
            base_vocab=self._vocab,
            column_maps=layouts,
            device=self._device,
            max_rank=max(content.rank for content in contents),
            lists=lists,
            page_lists=different,
            contents=by_name,
            obstacle=next((f"adapter {name} has {beyond}" for name, content in by_name.items()
                           if (beyond := content.beyond_graphs(self._vocab))), "") or list_obstacle(list(by_name), lists),
            copied_bytes=_copied_bytes(used, contents),
        )

    def _with_paged(
        self, contents: Sequence[SlotContent], places: Sequence[Mapping[str, LoraLinear]], lists: Mapping[str, KindLists],
        different: PageLists,
    ) -> list[dict[str, LoraLinear | PagedLinear]]:
        """`places` with the linears of which pages act: those are read where they lie."""
        linears: list[dict[str, LoraLinear | PagedLinear]] = [dict(place) for place in places]
        for kind, one in lists.items():
            for layer in one.counts.nonzero()[0].tolist():
                place = self._layers if kind == "lm_head" else layer
                behind = places[place].get(kind)
                bias = self._added_bias(contents, (place, kind)) if behind is None else None
                linears[place][kind] = PagedLinear(self._pool.pools[kind], kind, layer, different, bias, behind, self._side)
        return linears

    def _compose_linear(
        self, parts: Sequence[tuple[int, FusedPart]], sizes: Sequence[int], layouts: Layouts, bias: RowVectors | None,
    ) -> LoraLinear:
        """Slice-major rows of `parts` (column of W, share); a single share is used as it lies, without a copy."""
        rows: list[Tensor] = []
        columns: list[int] = []
        slices: list[ExpandSlice] = []
        taken = [0] * len(parts)
        out = 0
        for index, size in enumerate(sizes):
            start, factors = len(columns), []
            for number, (column, part) in enumerate(parts):
                if (b := part.b[index]) is None:
                    continue
                rank = b.shape[0]
                rows.append(part.a[taken[number]:taken[number] + rank])
                taken[number] += rank
                columns += [column] * rank
                factors.append(b)
            if factors:
                joined = factors[0] if len(factors) == 1 else torch.cat(_of_one_width(factors))
                slices.append(ExpandSlice(start, len(columns), out, out + joined.shape[1], joined))
            out += size
        a = parts[0][1].a if len(parts) == 1 else torch.cat(rows)
        return LoraLinear(a, tuple(slices), layouts.number(tuple(columns)), bias)

    def _added_bias(self, contents: Sequence[SlotContent], place: tuple[int, str]) -> RowVectors | None:
        return self._stacked([(column, content.lora_biases.get(place)) for column, content in enumerate(contents)])

    def _compose_vectors(self, layer: int, contents: Sequence[SlotContent]) -> Vectors | None:
        biases = self._stacked_by_name(layer, [content.biases for content in contents])
        norms = self._stacked_by_name(layer, [content.norms for content in contents])
        return Vectors(biases, norms) if biases or norms else None

    def _stacked_by_name(self, layer: int, vectors: Sequence[Mapping[tuple[int, str], Tensor]]) -> dict[str, RowVectors]:
        names = {name: None for part in vectors for place, name in part if place == layer}
        stacked = {name: self._stacked([(column, part.get((layer, name))) for column, part in enumerate(vectors)]) for name in names}
        return {name: found for name, found in stacked.items() if found is not None}

    def _stacked(self, vectors: Iterable[tuple[int, Tensor | None]]) -> RowVectors | None:
        present = [(column, vector) for column, vector in vectors if vector is not None]
        if not present:
            return None
        values = present[0][1].unsqueeze(0) if len(present) == 1 else torch.stack(_of_one_width([vector for _, vector in present]))
        return RowVectors(torch.tensor([column for column, _ in present], device=self._device), values)


def _of_one_width(parts: list[Tensor]) -> list[Tensor]:
    """Those of a head that has more rows with one adapter than with another are filled with zeros."""
    width = max(part.shape[-1] for part in parts)
    return [part if part.shape[-1] == width else torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts]


def _used(places: Sequence[Mapping[str, LoraLinear]], vectors: Sequence[Vectors | None]) -> list[Tensor]:
    linears = [linear for place in places for linear in place.values()]
    stacked = [linear.bias for linear in linears if linear.bias is not None]
    stacked += [found for part in vectors if part for found in (*part.biases.values(), *part.norms.values())]
    return [*(factor for linear in linears for factor in (linear.a, *(part.b for part in linear.slices))),
            *(found.values for found in stacked)]


def _copied_bytes(used: Sequence[Tensor], contents: Sequence[SlotContent]) -> int:
    own = {factor.data_ptr() for content in contents for part in content.parts.values() for factor in (part.a, *part.b)
           if factor is not None}
    own |= {vector.data_ptr() for content in contents
            for vector in (*content.lora_biases.values(), *content.biases.values(), *content.norms.values())}
    return sum(tensor.nbytes for tensor in used if tensor.data_ptr() not in own)

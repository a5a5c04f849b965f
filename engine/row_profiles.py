"""What adapters change on single rows of a decode step besides rank rows: profiles, each the vectors of one mix at its scales."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels.embedding_rows import EmbeddingRows
from ..kernels.head_rows import HeadPart, HeadRows
from ..kernels.rank_pages import RankRows
from ..kernels.repacked import RepackedWeight
from .device_rows import StepRows
from .dora_rows import EMBEDDING, Place
from .mix import ActiveUse
from .models.own_rows import Gates, OwnRows, ProfileVectors
from .own_embeddings import OwnEmbeddings
from .slots import SlotContent

if TYPE_CHECKING:
    from .models.decoder import Decoder

MOST_PROFILES = 16
"""different mixes of such adapters in one step"""
GATE = "gate_up_proj"
_Key = tuple[tuple[str, float], ...]
"""(digest, scale) of each adapter of a mix that has vectors or follows gains, in the order of the mix"""


@dataclass(frozen=True, slots=True)
class _Profile:
    number: int
    """from 1"""
    gated: bool
    """changes gate or up"""


class RowProfiles:
    """Profiles of one base, and which rows of its steps have which."""

    def __init__(self, decoder: Decoder, rows: StepRows, base_rows: Tensor) -> None:
        """`rows`: where it is written which row has what; `base_rows`: see OwnEmbeddings."""
        most = len(rows.heads)
        self._decoder, self._rows = decoder, rows
        self._vectors = ProfileVectors(decoder, min(most, MOST_PROFILES))
        self._heads = HeadRows(rows.heads, rows.device_heads, decoder.facts.vocab)
        self._terms = EmbeddingRows(rows.embeddings, rows.device_embeddings)
        self.embeddings = OwnEmbeddings(decoder, self._terms, base_rows)
        self._held: OrderedDict[_Key, _Profile] = OrderedDict()
        self._packed_gates = any(isinstance(layer.gate_up.weight, RepackedWeight) for layer in decoder.layers)
        self.gates: Gates = ""
        """which rows have a profile that changes gate or up, as far as it saves a product"""
        self.late: list[frozenset[str]] = []
        """by row, the adapters whose rank rows are added behind the gains of another"""

    def compose(self, contents: Mapping[str, SlotContent], uses: Sequence[tuple[ActiveUse, ...]]) -> str:
        """Make what the rows have, on which `uses` act, ready. Returns "", or why no captured step can have it."""
        which = self._rows.own  # profiles, the same where they change gate or up, whether a row has an embedding of its own
        which[:] = 0
        layers = self._decoder.facts.layers
        found = {row: _late(row, contents, layers) for row in dict.fromkeys(uses)}
        if why := next((why for _, why in found.values() if why), ""):
            return why
        self.late = [found[row][0] for row in uses]
        keys = [_key(row, contents, late) for row, late in zip(uses, self.late, strict=True)]
        wanted = {key: row for key, row in zip(keys, uses, strict=True) if key}
        if len(wanted) > self._vectors.count:
            return f"{len(wanted)} mixes with DoRA, trained biases or norms act, at most {self._vectors.count} do in a graph"
        for key, row in wanted.items():
            self._hold(key, row, contents, found[row][0], wanted)
        for row, key in enumerate(keys):
            if key:
                profile = self._held[key]
                which[:2, row] = profile.number, profile.number * profile.gated
        gated = which[1, : len(uses)] > 0
        self.gates = "all" if gated.all() and not self._packed_gates else "some" if gated.any() else ""
        self._heads.set([_head(row, contents) for row in uses])
        why = self.embeddings.compose(uses, contents)
        which[2, : len(uses)] = self.embeddings.rows
        return why

    def rows(self, count: int, gates: Gates, late: Sequence[Mapping[str, RankRows]]) -> OwnRows:
        """What a step of `count` rows reads."""
        which = self._rows.device_own[:, :count]
        return OwnRows(which[0], which[1], which[2], self._terms, self._vectors, self._heads, gates, late)

    def _hold(
        self, key: _Key, uses: Sequence[ActiveUse], contents: Mapping[str, SlotContent], late: frozenset[str],
        wanted: Mapping[_Key, object],
    ) -> None:
        if key not in self._held:
            number = len(self._held) + 1
            if number > self._vectors.count:
                number = self._held.pop(next(other for other in self._held if other not in wanted)).number
            parts = [(use.scale, contents[use.name], use.name in late) for use in uses]
            self._write(number - 1, parts)
            layers = self._decoder.facts.layers
            changed = [place for _, content, behind in parts
                       for place in content.changed_linears | (content.low_rank(layers) if behind else frozenset())]
            self._held[key] = _Profile(number, any(kind == GATE for _, kind in changed))
        self._held.move_to_end(key)

    def _write(self, index: int, parts: Sequence[tuple[float, SlotContent, bool]]) -> None:
        """What adapters do at their scales, and whether behind a DoRA; behind the steps that were launched, which may read what was
        there."""
        linears, norms = self._vectors.linears, self._vectors.norms
        self._vectors.clear(index)
        for scale, content, _ in parts:
            for place, gains in (content.dora.gains(scale) if content.dora else {}).items():
                if place != EMBEDDING:
                    linears[place][0][index] = gains
        for scale, content, late in parts:
            for place, bias in content.lora_biases.items():
                gains, shifts = (vectors[index] for vectors in linears[place])
                shifts += (1.0 if late else gains) * (bias.float() * scale)
            for place, bias in content.biases.items():
                linears[place][1][index] += bias.float() * scale
            for place, change in content.norms.items():
                norms[place][index] += change.float() * scale


def _key(uses: Sequence[ActiveUse], contents: Mapping[str, SlotContent], late: frozenset[str]) -> _Key:
    return tuple((use.digest, use.scale) for use in uses if use.name in late or contents[use.name].has_vectors)


def _head(uses: Sequence[ActiveUse], contents: Mapping[str, SlotContent]) -> HeadPart | None:
    for use in uses:
        part = contents[use.name].head
        if part is not None and part.replaced is not None:
            return HeadPart(part.replaced, None, 1 - use.scale, use.scale)
        if part is not None and part.rows is not None:
            return HeadPart(part.rows, part.ids, 1.0, use.scale)
    return None


def _late(uses: Sequence[ActiveUse], contents: Mapping[str, SlotContent], layers: int) -> tuple[frozenset[str], str]:
    """Those whose rank rows meet gains of another before them in the mix; and "", or why no captured step can have it: rank rows and
    gains are added and multiplied once each there, and rows of a head stand for those of the base, to which others would add."""
    heads = [use.name for use in uses if contents[use.name].head is not None]
    if not heads and (len(uses) == 1 or all(contents[use.name].dora is None for use in uses)):
        return frozenset(), ""
    late: set[str] = set()
    gained: dict[Place, str] = {}
    behind: dict[Place, str] = {}
    for use in uses:
        content = contents[use.name]
        if heads and (heads[-1] != use.name and content.head or (layers, "lm_head") in content.low_rank(layers) | content.changed_linears):
            return frozenset(), f"{use.name} changes the head beside the head rows of {heads[-1]}"
        gains = frozenset(content.dora.places if content.dora else ()) - {EMBEDDING}
        adds = content.low_rank(layers) | content.lora_biases.keys()
        if before := next((name for places in (gained, behind) for place, name in places.items() if place in gains), ""):
            return frozenset(), f"{use.name} has DoRA where {before} acts before it, which has DoRA or follows one"
        if not adds.isdisjoint(gained):
            late.add(use.name)
            behind |= dict.fromkeys(adds, use.name)
            if gains:
                before = next(gained[place] for place in adds if place in gained)
                return frozenset(), f"{use.name} has DoRA and follows {before}, which has it too"
        gained |= dict.fromkeys(gains, use.name)
    return frozenset(late), ""

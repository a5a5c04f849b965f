"""What adapters make of the embedding of a row's token in a decode step, as the terms that its kernel adds."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels.embedding_rows import MOST_TERMS, EmbeddingRows, Term
from .dora_rows import EMBEDDING
from .mix import ActiveUse
from .slots import SlotContent, VocabularyPart

if TYPE_CHECKING:
    from .models.decoder import Decoder


class OwnEmbeddings:
    """The rows of a step whose adapters change the embedding. What they do is what `acting_embedding` does."""

    def __init__(self, decoder: Decoder, rows: EmbeddingRows, base_rows: Tensor) -> None:
        """`base_rows` [rows, hidden]: the base's for the tokens of a step, where its embedding is packed."""
        self._vocab, self._rows = decoder.facts.vocab, rows
        self._table = decoder.embedding if isinstance(decoder.embedding, Tensor) else None
        self._base_rows = base_rows
        self._mixes: list[_Mix | None] = []
        self._known: dict[str, dict[int, int]] = {}
        """where the trained rows of each content lie, by token"""

    def compose(self, uses: Sequence[tuple[ActiveUse, ...]], contents: Mapping[str, SlotContent]) -> str:
        """What acts on each row from now on. Returns "", or why no captured step can have it."""
        self._known = {use.digest: self._known.get(use.digest) or _places(part) for row in uses for use in row
                       if (part := contents[use.name].embedding) is not None and part.ids is not None}
        self._mixes = [self._mix(row, contents) for row in uses]
        self._rows.set(())
        most = max((mix.most_terms for mix in self._mixes if mix is not None), default=0)
        return f"adapters change an embedding in {most} ways, at most {MOST_TERMS} do in a graph" if most > MOST_TERMS else ""

    @property
    def rows(self) -> list[bool]:
        """Which rows have one of their own."""
        return [mix is not None for mix in self._mixes]

    def set(self, ids: Sequence[int]) -> None:
        """The tokens of the rows."""
        if any(self.rows):
            self._rows.set([mix.terms(self._base(row, token), token, self._vocab) if mix is not None else ()
                            for row, (mix, token) in enumerate(zip(self._mixes, ids, strict=True))])

    def _base(self, row: int, token: int) -> tuple[Tensor, int]:
        return (self._base_rows, row) if self._table is None else (self._table, min(token, self._vocab - 1))

    def _mix(self, uses: Sequence[ActiveUse], contents: Mapping[str, SlotContent]) -> _Mix | None:
        parts = [(use.scale, part, self._known.get(use.digest, {}), _gains(contents[use.name], use.scale))
                 for use in uses if (part := contents[use.name].embedding) is not None]
        return _Mix(parts) if parts else None


class _Mix:
    def __init__(self, parts: Sequence[tuple[float, VocabularyPart, Mapping[int, int], Tensor | None]]) -> None:
        """(scale, what it does, where its trained rows lie, its gains)"""
        self._parts = parts

    @property
    def most_terms(self) -> int:
        return 1 + sum((part.replaced is not None or part.rows is not None) + (part.a is not None) + (gains is not None)
                       for _, part, _, gains in self._parts)

    def terms(self, base: tuple[Tensor, int], token: int, vocab: int) -> list[Term]:
        found = []
        for scale, part, places, _ in self._parts:
            if part.replaced is not None and token < len(part.replaced):
                found.append((scale, part.replaced, token))
            elif part.rows is not None and token in places:
                found.append((scale, part.rows, places[token]))
        if token >= vocab:  # no row of the base to differ from: they share it evenly
            terms = [Term("row", matrix, index, weight=1 / len(found)) for _, matrix, index in found]
        else:
            terms = [Term("row", *base, weight=1 - sum(scale for scale, _, _ in found))]
            terms += [Term("row", matrix, index, weight=scale) for scale, matrix, index in found]
        for scale, part, _, gains in self._parts:
            if part.a is not None and token < len(part.a):
                terms.append(Term("lora", part.a, token, part.b, scale))
            if gains is not None:
                terms.append(Term("gains", gains))
        return terms


def _places(part: VocabularyPart) -> dict[int, int]:
    return {token: place for place, token in enumerate(part.ids.tolist())}


def _gains(content: SlotContent, scale: float) -> Tensor | None:
    return content.dora.gains(scale).get(EMBEDDING) if content.dora is not None else None

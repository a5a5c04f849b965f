"""Which mix acts on which tokens of one request: more than one where it was changed while the reply was written."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .mix import ActiveUse, TokenMix
from .stretches import Stretch


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens from index `start` of a request up to the next part, or its end."""

    start: int
    mix: TokenMix


@dataclass(frozen=True, slots=True)
class MixHistory:
    """`parts` ascend from 0 on; what acts on each token, in a form that keys are made of, is in `stretches`."""

    parts: tuple[Part, ...]
    stretches: tuple[Stretch, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stretches", tuple(_stretches(self.parts)))

    @classmethod
    def of(cls, mix: TokenMix) -> MixHistory:
        """`mix` on every token."""
        return cls((Part(0, mix),))

    @property
    def mix(self) -> TokenMix:
        """The one that holds now."""
        return self.parts[-1].mix

    @property
    def uses(self) -> tuple[ActiveUse, ...]:
        """Everything that acts on some token."""
        return self.uses_from(0)

    def uses_from(self, token: int) -> tuple[ActiveUse, ...]:
        """Everything that acts on the tokens from index `token` on."""
        return tuple(use for part, end in _bounded(self.parts) if end > token for use in part.mix.active)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that need a slot to compute every token again."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.mix.names))

    def spliced(self, start: int, mix: TokenMix) -> MixHistory:
        """`mix` from token `start` on; what lies before stays as it was."""
        return MixHistory((*(part for part in self.parts if part.start < start), Part(start, mix)))

    def replaced(self, mix: TokenMix) -> MixHistory:
        """`mix` where the one acts that holds now."""
        return MixHistory((*self.parts[:-1], Part(self.parts[-1].start, mix)))

    def renamed(self, name: str, new: str) -> MixHistory:
        """The content that acts as `name` acts as `new`."""
        return MixHistory(tuple(Part(part.start, part.mix.renamed(name, new)) for part in self.parts))

    def pieces(self, position: int, count: int) -> Iterator[tuple[TokenMix, int, int]]:
        """The tokens [position, position + count) as (mix, first token, tokens) of each part that they lie in."""
        for part, end in _bounded(self.parts):
            first, last = max(part.start, position), min(end, position + count)
            if first < last:
                yield part.mix, first, last - first


def _bounded(parts: tuple[Part, ...]) -> Iterator[tuple[Part, int]]:
    """The parts with the token before which each ends, far beyond any request for the last."""
    return zip(parts, (*(part.start for part in parts[1:]), 1 << 62), strict=True)


def _stretches(parts: tuple[Part, ...]) -> Iterator[Stretch]:
    """Of all parts; one that changes nothing is left out."""
    last = None
    for part, end in _bounded(parts):
        for stretch in part.mix.stretches(part.start):
            if stretch.start < end and (last is None or stretch.acting != last.acting):
                last = stretch
                yield stretch

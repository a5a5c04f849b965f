"""Which adapters acted on which tokens of a request: what its keys and values were computed with."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acting:
    """One adapter on a token. `name` is for people; `digest` and `scale` (never 0) are what counts."""

    name: str
    digest: str
    scale: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """The tokens from index `start` of a request up to the next stretch, or its end. `acting` is in the order of the mix."""

    start: int
    acting: tuple[Acting, ...] = ()

"""What a check found out about one adapter on one base. All text in it comes from files: untrusted."""
from __future__ import annotations

from math import inf
from typing import Literal

from .facts import AdapterInfo
from .words import Struct


class FieldVerdict(Struct):
    """One field of an adapter's config, as it stands there and what is made of it."""

    field: str
    value: str
    """as JSON, cut"""
    verdict: Literal["honoured", "irrelevant", "refused"]
    why: str


class ScaleGroup(Struct):
    """Modules that share an effective scale."""

    scale: float
    kinds: dict[str, int]
    """module kind (q_proj, ...) -> how many"""


class DeltaNorm(Struct):
    """How far a part of the base is moved: Frobenius norms of the change at scale 1 and of the weights that it changes."""

    place: str
    """"layer 3", "embed_tokens", "lm_head", "rows of embed_tokens", "norms and biases" """
    delta: float
    weight: float

    @property
    def share(self) -> float:
        """Infinite where something is added to nothing (a bias that the base does not have)."""
        return self.delta / self.weight if self.weight > 0 else inf if self.delta > 0 else 0.0


class PromptEffect(Struct):
    """The base beside the adapter over one prompt and the base's own reply to it, token by token."""

    prompt: str
    positions: int
    changed: int
    """positions at which another token is the likeliest"""
    kl: float
    """mean of KL(base || adapter) over the positions, in nats"""
    before: str = ""
    """the likeliest token of the base at the first change in the reply, as text"""
    after: str = ""
    """the adapter's"""


class Finding(Struct):
    """One thing that a person should know. "refused": it cannot be used; "warning": it may not do what is expected; "note": the rest."""

    level: Literal["refused", "warning", "note"]
    text: str


class CheckReport(Struct):
    """`info` is None for an adapter that cannot be loaded: the first finding says why, the rest is what can be known all the same."""

    path: str
    name: str
    model: str
    findings: tuple[Finding, ...] = ()
    info: AdapterInfo | None = None
    about: dict[str, str] = {}
    """what the file says of itself: metadata, model card"""
    fields: tuple[FieldVerdict, ...] = ()
    tensors: int = 0
    dtypes: dict[str, int] = {}
    modules: tuple[str, ...] = ()
    """of the base, on which it acts"""
    unmatched: tuple[str, ...] = ()
    scales: tuple[ScaleGroup, ...] = ()
    deltas: tuple[DeltaNorm, ...] = ()
    effect: tuple[PromptEffect, ...] = ()
    """empty when no effect run was made"""

    @property
    def usable(self) -> bool:
        return not any(finding.level == "refused" for finding in self.findings)

    @property
    def changed_share(self) -> float:
        """Share of all positions of the effect run at which another token is the likeliest."""
        positions = sum(part.positions for part in self.effect)
        return sum(part.changed for part in self.effect) / positions if positions else 0.0

    @property
    def mean_kl(self) -> float:
        """KL(base || adapter) in nats, over all positions of the effect run."""
        positions = sum(part.positions for part in self.effect)
        return sum(part.kl * part.positions for part in self.effect) / positions if positions else 0.0

"""A reply of a comparison as it comes, for screen and command line."""
from __future__ import annotations

from dataclasses import dataclass, field

from ..engine import protocol as p
from .comparison import Column, Reply
from .transcript import Phase


@dataclass
class Row:
    """What a column answers to one prompt, as far as it is."""

    request_id: int
    column: Column
    phase: Phase = "queued"
    text: str = ""
    pieces: list[str] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    tokens: int = 0
    activations: tuple[p.Activation, ...] = ()
    cache: p.CacheUse | None = None
    stats: p.RequestStats | None = None
    reason: str = ""
    note: str = ""
    """why it waits, failed or was cut"""

    @property
    def active(self) -> bool:
        return self.phase in ("queued", "running")

    def take(self, event: p.Event) -> None:
        """Fold an event of its request in."""
        match event:
            case p.RequestQueued() | p.RequestPreempted():
                self.phase, self.note = "queued", event.because
            case p.RequestStarted():
                self.phase, self.note, self.activations = "running", "", event.activations
                self.cache = self.cache or event.cache  # what it found when it began; later ones follow a preemption
            case p.InvocationFired():
                others = tuple(each for each in self.activations if each.adapter != event.activation.adapter)
                self.activations = (*others, event.activation)
            case p.TextDelta():
                self.text += event.text
                self.pieces += [""] * (event.tokens - len(self.pieces) - 1) + [event.text]
                self.tokens = event.tokens
            case p.RequestFinished():
                self.phase, self.note, self.reason = "done", event.detail, event.reason
                self.stats, self.ids, self.tokens = event.stats, event.ids, event.stats.new_tokens
            case p.RequestFailed():
                self.phase, self.note = "failed", event.message

    @property
    def reply(self) -> Reply:
        failed = self.note if self.phase in ("failed", "lost") else ""
        return Reply(self.text, self.ids, tuple(self.pieces), self.reason, self.stats, self.activations, self.cache, failed)

"""The chat as the person sees it: turns with versions of their reply, and notices between them."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..engine.protocol import Activation, Message, Mix, RequestStats, Sampling
from .reload_text import SHOWN_DIGEST

Phase = Literal["waiting", "queued", "running", "done", "failed", "lost"]


@dataclass(frozen=True)
class Splice:
    """The mix changed while the reply was made: from token `token`, at character `at` of the text."""

    at: int
    token: int
    before: Mix
    after: Mix


@dataclass
class Version:
    """One reply to a turn, with all that made it."""

    request_id: int
    history: tuple[Message, ...]
    mix: Mix
    sampling: Sampling
    opening: str = ""
    invoked: str = ""
    """the adapter whose invocation this reply is; "" for a reply of the chat"""
    phase: Phase = "waiting"
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    splices: list[Splice] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)
    """adapter -> digest of the content that it was made with"""
    ambiguous: frozenset[str] = frozenset()
    """adapters of `contents` whose name meant several contents in this session"""
    activations: tuple[Activation, ...] = ()
    stats: RequestStats | None = None
    reason: str = ""
    note: str = ""
    """why it waits, failed or was cut"""

    @property
    def active(self) -> bool:
        return self.phase in ("waiting", "queued", "running")

    @property
    def marks(self) -> dict[str, str]:
        """Short digests of the adapters whose names do not say which content it was."""
        return {name: self.contents[name][:SHOWN_DIGEST] for name in self.ambiguous if name in self.contents}

    @property
    def mix_now(self) -> Mix:
        """The mix of its latest token."""
        return self.splices[-1].after if self.splices else self.mix


@dataclass
class Turn:
    """What the person said and the replies to it. An invocation of an aLoRA is a turn without words of the person."""

    asked: str
    versions: list[Version] = field(default_factory=list)
    shown: int = 0

    @property
    def version(self) -> Version:
        return self.versions[self.shown]

    def add(self, version: Version) -> None:
        self.versions.append(version)
        self.shown = len(self.versions) - 1

    def step(self, by: int) -> bool:
        """Show another version; False at the ends."""
        wanted = self.shown + by
        if not 0 <= wanted < len(self.versions):
            return False
        self.shown = wanted
        return True


@dataclass
class Notice:
    """A line between turns: help, an error with what to do, the card of an engine that died."""

    kind: Literal["info", "error", "engine"]
    text: str
    resolved: bool = False


Item = Turn | Notice


def history_of(items: list[Item], system: str) -> tuple[Message, ...]:
    """The messages a next turn continues from: every answered turn with the version that is shown; invocations are not part."""
    messages = [Message("system", system)] if system else []
    for item in items:
        if isinstance(item, Turn) and item.versions and not item.version.invoked:
            version = item.version
            if version.text:  # a question without a reply would put two user messages in a row
                messages += [Message("user", item.asked), Message("assistant", version.text)]
    return tuple(messages)

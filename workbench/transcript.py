"""The chat as the person sees it: turns with versions of their reply, and notices between them."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ..engine.protocol import (
    Activation,
    CacheUse,
    Event,
    InvocationFired,
    Message,
    Mix,
    MixChange,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestStarted,
    RequestStats,
    Sampling,
    TextDelta,
)
from .pace import Pace
from .reload_text import SHOWN_DIGEST

Phase = Literal["waiting", "queued", "running", "done", "failed", "lost"]


@dataclass(frozen=True)
class Splice:
    """The mix changed while the reply was made: from token `token`, at character `at` of the text."""

    at: int
    token: int
    before: Mix
    after: Mix
    change: MixChange = "splice"
    """"finish": the reply goes on under `before`"""
    recomputed: int | None = 0
    """tokens that were computed again under `after`; None for a reply that waited, where they are known when it goes on"""


@dataclass(frozen=True)
class Fired:
    """The model wrote the invocation of an aLoRA: it ends at character `at`, with token `token` of the reply."""

    at: int
    token: int
    adapter: str


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
    fired: list[Fired] = field(default_factory=list)
    cache: CacheUse | None = None
    """what of its prompt was there when it began; None until it is known"""
    preempted: int = 0
    """how often it had to wait again for KV memory"""
    again: CacheUse | None = None
    """what was still there when it last went on after that"""
    stats: RequestStats | None = None
    reason: str = ""
    note: str = ""
    """why it waits, failed or was cut"""

    def __post_init__(self) -> None:
        self.pace = Pace()  # no field: a chat's file has nothing of it

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
        return next((splice.after for splice in reversed(self.splices) if splice.change != "finish"), self.mix)

    @property
    def marks_in_text(self) -> list[Splice | Fired]:
        """Changes of the mix and invocations that the model wrote, in the order of the text."""
        return sorted([*self.splices, *self.fired], key=lambda mark: (mark.at, mark.token))

    def take(self, event: Event) -> None:
        """Fold an event of its request in."""
        match event:
            case RequestQueued():
                self.phase, self.note = "queued", event.because
            case RequestStarted():
                self._began(event)
            case RequestPreempted():
                self.phase, self.note = "queued", event.because
                self.preempted += 1
            case InvocationFired():
                others = (each for each in self.activations if each.adapter != event.activation.adapter)
                self.activations = (*others, event.activation)
                self.fired.append(Fired(len(self.text), event.at_token, event.activation.adapter))
            case TextDelta():
                self.text += event.text
                self.tokens = event.tokens
                self.pace.take(event.tokens)
            case RequestFinished():
                self.phase, self.reason, self.stats, self.note = "done", event.reason, event.stats, event.detail
                self.tokens = event.stats.new_tokens
            case RequestFailed():
                self.phase, self.note = "failed", event.message

    def _began(self, event: RequestStarted) -> None:
        self.phase, self.note, self.activations, self.pace = "running", "", event.activations, Pace()
        if self.preempted:
            self.again = event.cache
        else:
            self.prompt_tokens = event.prompt_tokens
            self.cache = event.cache if event.cache.prompt_tokens else None

    def take_change(self, splice: Splice) -> None:
        """A change of the mix. Of those that wait for its end, and of those between two of its tokens, the latest alone counts."""
        if self.splices and self.splices[-1].change == "finish":
            self.splices.pop()
        if self.splices and self._replaces(splice, self.splices[-1]):
            splice = replace(splice, before=self.splices.pop().before)
        if splice.after != self.mix_now:
            self.splices.append(splice)

    @staticmethod
    def _replaces(new: Splice, old: Splice) -> bool:
        """No token was made under `old`. Two recomputes that lead back leave a mark: what was spliced before them is gone."""
        return (new.change, new.token) == (old.change, old.token) and (new.change == "splice" or new.after != old.before)


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

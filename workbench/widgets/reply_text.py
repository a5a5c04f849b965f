"""The text of one reply: Markdown in segments between the places where what acts on it changed."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from markdown_it import MarkdownIt
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Markdown, Static

from ..live_change import splice_text
from ..text import clean, clean_line
from ..transcript import Fired, Version

PLAIN_ABOVE = 64 << 10
PLAIN_ABOVE_ROWS = 150
_PLAIN_STEP = 2048
"""a plain text is redrawn when it grew by so many characters, or is finished"""


@dataclass(frozen=True)
class Segment:
    """A part of a reply, cleaned. `kind` tells how it is drawn."""

    kind: Literal["markdown", "plain", "splice"]
    text: str


def segments(version: Version) -> list[Segment]:
    """The reply's parts in order. A code fence that is open at a mark is closed there and opened again after it."""
    parts: list[Segment] = []
    start, reopen = 0, ""
    for mark in version.marks_in_text:
        text = reopen + version.text[start:mark.at]
        reopen = _open_fence(text)
        if text.strip():
            parts.append(_drawn(text + ("\n```" if reopen else "")))
        line = f"── ⚑ {mark.adapter} acts: the model wrote its invocation ──" if isinstance(mark, Fired) else splice_text(mark)
        parts.append(Segment("splice", clean_line(line, 300)))
        start = mark.at
    rest = version.text[start:]
    return [*parts, _drawn(reopen + rest)] if rest else parts


def markdown_parser() -> MarkdownIt:
    """Markdown that hides nothing of what a model said: no HTML, no entities, no link definitions; a newline is a newline."""
    parser = MarkdownIt("gfm-like", {"html": False}).disable(["entity", "reference"])
    parser.core.ruler.push("newlines", _keep_newlines)
    return parser


def _keep_newlines(state) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


def _open_fence(text: str) -> str:
    """The opening line of a fence that `text` leaves open, else ""."""
    opening = ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            opening = "" if opening else line.strip() + "\n"
    return opening


def _drawn(text: str) -> Segment:
    rows = sum(line.startswith("|") for line in text.splitlines())
    plain = len(text) > PLAIN_ABOVE or rows > PLAIN_ABOVE_ROWS
    return Segment("plain" if plain else "markdown", clean(text))


class ReplyText(Vertical):
    """Shows a version's segments; new text is appended where possible, and drawn whole once it is finished."""

    def __init__(self) -> None:
        super().__init__(classes="reply-text")
        self._drawn: list[Segment] = []
        self._parts: list[Markdown | Static] = []
        self._last_write = None

    async def show(self, version: Version) -> None:
        """Bring the widgets to the version's text. A write that is still under way makes this call a no-op."""
        if self._last_write is not None and not self._last_write.is_done and version.active:
            return
        wanted = segments(version)
        for index, segment in enumerate(wanted):
            if index < len(self._drawn) and self._drawn[index].kind == segment.kind:
                await self._grow(index, segment, done=not version.active)
            else:
                await self._replace_from(index, segment)
        await self._drop_from(len(wanted))

    async def _grow(self, index: int, segment: Segment, done: bool) -> None:
        before, part = self._drawn[index], self._parts[index]
        if before == segment:
            return
        if isinstance(part, Markdown):
            grown = segment.text.startswith(before.text) and not done
            self._last_write = part.append(segment.text[len(before.text):]) if grown else part.update(segment.text)
            await self._last_write
        elif done or segment.kind == "splice" or len(segment.text) - len(before.text) > _PLAIN_STEP:
            part.update(Content(segment.text))
        else:
            return
        self._drawn[index] = segment

    async def _replace_from(self, index: int, segment: Segment) -> None:
        await self._drop_from(index)
        if segment.kind == "markdown":
            part: Markdown | Static = Markdown(segment.text, parser_factory=markdown_parser, open_links=False)
        else:
            part = Static(Content(segment.text), classes=segment.kind, markup=False)
        self._drawn.append(segment)
        self._parts.append(part)
        await self.mount(part)

    async def _drop_from(self, index: int) -> None:
        for part in self._parts[index:]:
            await part.remove()
        del self._parts[index:], self._drawn[index:]

    async def finish(self, version: Version) -> None:
        """Draw the finished text once as a whole: streamed Markdown may differ from it."""
        await self.show(version)
        for segment, part in zip(self._drawn, self._parts, strict=True):
            if isinstance(part, Markdown) and not version.active:
                await part.update(segment.text)

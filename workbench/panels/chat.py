"""The chat pane: notices here, turns with their replies in `turn.py`, what both share in `item.py`."""
from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ..text import clean, clean_line
from ..transcript import Item, Notice, Turn
from .item import ItemView

if TYPE_CHECKING:
    from textual.widgets import Markdown


class NoticeView(ItemView):
    """Help, an error with what to do, or the card of an engine that died."""

    _MARKS = {"info": "", "error": "✗ ", "engine": "✗ "}

    def __init__(self, notice: Notice) -> None:
        super().__init__(notice)
        self.add_class(notice.kind)
        self._notice = notice
        self._shown = (notice.text, notice.resolved)

    def compose(self) -> ComposeResult:
        yield Static(self._text(), markup=False)

    async def show(self) -> None:
        now = (self._notice.text, self._notice.resolved)
        if self._shown != now:
            self._shown = now
            self.query_one(Static).update(self._text())

    def _text(self) -> Content:
        text = self._MARKS[self._notice.kind] + clean(self._notice.text[:20_000])
        if self._notice.kind == "engine":
            text += "\nThe engine was started again." if self._notice.resolved else (
                "\nThe chat is kept. Ctrl+E, or Enter here: start the engine again with the same model, adapters, pins and mix.")
        return Content(text)


class Transcript(VerticalScroll, can_focus=False):
    """All items; it follows the end until the person scrolls up."""

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self._views: list[ItemView] = []
        self._writing = asyncio.Lock()
        self._shown_welcome: Content | None = None
        self._welcome = Static("", id="welcome", markup=False)

    def compose(self) -> ComposeResult:
        with Vertical(id="transcript-items"):  # as high as the pane at least: the anchor scrolls shorter ones below the top
            yield self._welcome

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        self.app.notify(clean_line(f"not opened: {event.href}", 300), title="A link of the model", markup=False)

    async def show(self, items: list[Item], welcome: Content) -> None:
        """Bring the views to the items; `welcome` stands where there are none."""
        self._welcome.display = not items
        if not items and welcome != self._shown_welcome:
            self._shown_welcome = welcome
            self._welcome.update(welcome)
        async with self._writing:  # keys and ticks may ask at once
            await self._match(items)
            for view in self._views:
                await view.show()

    async def _match(self, items: list[Item]) -> None:
        kept = 0
        while kept < min(len(items), len(self._views)) and self._views[kept].item is items[kept]:
            kept += 1
        for view in self._views[kept:]:
            await view.remove()
        del self._views[kept:]
        if kept == len(items):
            return
        from .turn import TurnView  # it brings Markdown: not needed for the first paint

        if not self._views:  # the welcome, which may be longer than the pane, is read from its top
            self.anchor()
        new = [TurnView(item) if isinstance(item, Turn) else NoticeView(item) for item in items[kept:]]
        self._views += new
        await self.query_one("#transcript-items").mount_all(new)

"""Screens and lists hold where Textual's own do not: two sizes at once, no room for any pane, keys before a list is laid out."""
from __future__ import annotations

from typing import Any

from textual import events
from textual.await_complete import AwaitComplete
from textual.command import CommandList, CommandPalette
from textual.dom import DOMNode
from textual.widget import Widget
from textual.widgets import OptionList

from ..widgets.prompt import Prompt


class SteadySize:
    """Beside a Screen class, before it: sizes that the terminal had, but has no more, are not laid out.

    A screen that lays out a size posts that size to itself. Two of them on their way would call each other up for ever.
    """

    def _on_resize(self, event: events.Resize) -> None:
        if event.size != self.app.size:
            event.stop()
            event.prevent_default()

    def dismiss(self, result: Any = None) -> AwaitComplete:
        """Once: a second key, as fast, would close the screen below, and the program with the last one."""
        return super().dismiss(result) if self.is_current else AwaitComplete.nothing()


class KeptPane(SteadySize):
    """Beside a Screen class with a prompt, before it: a pane for which there was no room, and which lost the keys so, has them again."""

    _pane: Widget | None = None

    def on_resize(self) -> None:
        self._pane = self.focused or self._pane
        self.call_after_refresh(self._resized)

    async def _resized(self) -> None:
        if self.focused is None:
            there = (pane for pane in (self._pane, self.query_one(Prompt)) if pane and pane.is_attached and _seen(pane))
            self.set_focus(next(there, None))
        await self.show()


def _seen(widget: Widget) -> bool:
    return all(node.display for node in widget.ancestors_with_self)


class Palette(SteadySize, CommandPalette):
    """The command palette, which is a screen too."""


def goes_by_no_lines(action: str, node: DOMNode | None) -> bool:
    """Whether an action would go by the lines of a list that is not laid out yet: page keys would end the program there."""
    if isinstance(node, Palette) and action.startswith("command_list"):
        node = node.query_one(CommandList)
    return isinstance(node, OptionList) and not node.scrollable_content_region

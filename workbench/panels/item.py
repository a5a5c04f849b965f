"""What every item of the chat has: its keys, its place among the others."""
from __future__ import annotations

from textual.containers import Vertical
from textual.message import Message

from ..keys import bindings
from ..text import clean
from ..transcript import Item, Notice


class ItemView(Vertical, can_focus=True):
    """One item of the transcript; it has the keys of the chat pane."""

    BINDINGS = bindings("reply")

    class Restart(Message):
        """The card of a dead engine was answered: start again."""

    class Copied(Message):
        """So many characters are on the clipboard."""

        def __init__(self, characters: int) -> None:
            super().__init__()
            self.characters = characters

    def __init__(self, item: Item) -> None:
        super().__init__(classes="item")
        self.item = item

    def action_previous(self) -> None:
        self._go(-1)

    def action_next(self) -> None:
        self._go(1)

    def action_older(self) -> None:
        """Only a turn has versions."""

    def action_newer(self) -> None:
        """Only a turn has versions."""

    def action_copy(self) -> None:
        text = clean(self.copied())
        self.app.copy_to_clipboard(text)
        self.post_message(self.Copied(len(text)))

    def action_card(self) -> None:
        if isinstance(self.item, Notice) and self.item.kind == "engine" and not self.item.resolved:
            self.post_message(self.Restart())

    def copied(self) -> str:
        return self.item.text if isinstance(self.item, Notice) else self.item.version.text

    def _go(self, by: int) -> None:
        views = list(self.screen.query(ItemView))
        index = views.index(self) + by
        if 0 <= index < len(views):
            views[index].focus()

    async def show(self) -> None:
        """Bring the widgets to what the item holds."""

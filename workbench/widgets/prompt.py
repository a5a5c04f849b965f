"""The field for the message to the model."""
from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from ..control import MAX_PROMPT
from ..keys import bindings
from ..text import clean
from .keys_in_order import KeysInOrder

HISTORY = 200


class Prompt(KeysInOrder, TextArea):
    """Enter sends, Ctrl+J breaks the line, ↑ in an empty field brings earlier messages back."""

    BINDINGS = bindings("prompt")

    class Sent(Message):
        """The person sent `text`; the receiver calls `taken` or `put_back`."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class TooLong(Message):
        """A paste was not taken."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

    def __init__(self, engine_gone: Callable[[], bool] = lambda: False) -> None:
        super().__init__(id="prompt", placeholder="Message…  Enter sends, / for commands", show_line_numbers=False, compact=True)
        self._engine_gone = engine_gone
        self._history: list[str] = []
        self._at = 0

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "ctrl+e" and self._engine_gone():  # else it goes to the end of the line, as in every field
            event.prevent_default()
            event.stop()
            await self.app.run_action("restart_engine")

    def action_send(self) -> None:
        """Give the text away and empty the field: what is typed from now on belongs to the next message."""
        text = self.text
        if text.strip():
            self.clear()
            self.post_message(self.Sent(text))

    def action_newline(self) -> None:
        self.insert("\n")

    def taken(self, text: str) -> None:
        """The message was taken: remember it."""
        self._history = [*self._history, text][-HISTORY:]
        self._at = len(self._history)

    def put_back(self, text: str) -> None:
        """The message was not taken: it stands in the field again, before what was typed since."""
        self.text = text + self.text
        self.move_cursor(self.document.end)

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and self._browsing() and self._at > 0:
            self._recall(self._at - 1)
        elif not self._browsing() or self.cursor_location[0] > 0:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self.text and self._browsing() and self._at < len(self._history):
            self._recall(self._at + 1)
        else:
            super().action_cursor_down(select)

    def _browsing(self) -> bool:
        recalled = self._history[self._at] if self._at < len(self._history) else ""
        return self.text in ("", clean(recalled))

    def _recall(self, index: int) -> None:
        self._at = index
        self.text = clean(self._history[index]) if index < len(self._history) else ""
        self.move_cursor(self.document.end)

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        if len(event.text) + len(self.text) > MAX_PROMPT:
            self.post_message(self.TooLong(len(event.text)))
        else:
            self.insert(clean(event.text.replace("\r\n", "\n").replace("\r", "\n")))

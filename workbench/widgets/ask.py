"""One question asked in place: a label, a field, and the reason why an answer will not do."""
from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from ..text import clean_line
from .keys_in_order import LineField

MOST_CHARACTERS = 16_000
Take = Callable[[str], str | None]
"""Takes the answer; returns a sentence when it will not do."""


class AskField(LineField):
    """Enter gives the answer, Esc leaves, both at the key: what is typed behind them is for the pane that has the focus then."""

    BINDINGS = [Binding("enter", "give", "Set", id="ask.give", tooltip="Take what is in the field"),
                Binding("escape", "leave", "Leave", id="ask.leave", tooltip="Close the field and change nothing")]

    async def _on_key(self, event: events.Key) -> None:
        if event.key in ("tab", "shift+tab"):
            self.parent.leave()
        if not self.parent.display:
            event.prevent_default()
            event.stop()
            self.app.post_message(events.Key(event.key, event.character))

    def action_give(self) -> None:
        self.parent.give()

    def action_leave(self) -> None:
        self.parent.leave()


class Ask(Vertical):
    """Hidden until `ask` is called. Enter gives the answer, Esc leaves; the focus then returns to where it was."""

    FIELD = AskField

    def __init__(self, name: str = "ask") -> None:
        super().__init__(id=name, classes="ask")
        self._take: Take | None = None
        self._back: Widget | None = None

    def compose(self) -> ComposeResult:
        yield Static("", classes="ask-label", markup=False)
        yield self.FIELD(id=f"{self.id}-field", compact=True, select_on_focus=True, max_length=MOST_CHARACTERS)
        yield Static("", classes="ask-problem", markup=False)

    def ask(self, label: str, value: str, take: Take) -> None:
        """Show the field with `value` in it; `take` is called with what was typed until it returns None."""
        if not self.display:
            self._back = self.screen.focused
        self._take = take
        self.query_one(".ask-label", Static).update(Content(clean_line(label)))
        self._problem("")
        self.display = True
        field = self.query_one(AskField)
        field.value = clean_line(value, MOST_CHARACTERS)
        self.screen.set_focus(field)  # at once: the next key is typed into it

    def give(self) -> None:
        """Hand over what was typed; leave, or say why it will not do."""
        problem = self._take(self.query_one(AskField).value) if self._take else None
        if problem:
            self._problem(problem)
        else:
            self.leave()

    def leave(self) -> None:
        if self._back and self._back.is_attached and self.has_focus_within:
            self.screen.set_focus(self._back)
        self.display = False

    def _problem(self, text: str) -> None:
        shown = self.query_one(".ask-problem", Static)
        shown.update(Content(clean_line(text, 300)))
        shown.display = bool(text)

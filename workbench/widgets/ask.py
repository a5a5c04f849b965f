"""One question asked in place: a label, a field, and the reason why an answer will not do."""
from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Input, Static

from ..text import clean_line

MOST_CHARACTERS = 16_000
Take = Callable[[str], str | None]
"""Takes the answer; returns a sentence when it will not do."""


class Ask(Vertical):
    """Hidden until `ask` is called. Enter gives the answer, Esc leaves; the focus then returns to where it was."""

    BINDINGS = [Binding("escape", "leave", "Leave", id="ask.leave", priority=True, tooltip="Close the field and change nothing")]

    def __init__(self) -> None:
        super().__init__(id="ask")
        self._take: Take | None = None
        self._back: Widget | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="ask-label", markup=False)
        yield Input(id="ask-field", compact=True, select_on_focus=True, max_length=MOST_CHARACTERS)
        yield Static("", id="ask-problem", markup=False)

    def ask(self, label: str, value: str, take: Take) -> None:
        """Show the field with `value` in it; `take` is called with what was typed until it returns None."""
        if not self.display:
            self._back = self.screen.focused
        self._take = take
        self.query_one("#ask-label", Static).update(Content(clean_line(label)))
        self._problem("")
        self.display = True
        field = self.query_one(Input)
        field.value = clean_line(value, MOST_CHARACTERS)
        self.screen.set_focus(field)  # at once: the next key is typed into it

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        problem = self._take(event.value) if self._take else None
        if problem:
            self._problem(problem)
        else:
            self.action_leave()

    def action_leave(self) -> None:
        if self._back and self._back.is_attached and self.has_focus_within:
            self.screen.set_focus(self._back)
        self.display = False

    def _problem(self, text: str) -> None:
        shown = self.query_one("#ask-problem", Static)
        shown.update(Content(clean_line(text, 300)))
        shown.display = bool(text)

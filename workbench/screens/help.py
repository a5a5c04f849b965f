"""F1: the keys of the focused pane, then those that work everywhere."""
from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from ..keys import PANE_TITLES, help_lines


class HelpScreen(ModalScreen[None]):
    """Lists keys with what they do; Esc closes it."""

    BINDINGS = [Binding("escape,f1,q", "close", "Close", id="help.close", tooltip="Close the help")]

    def __init__(self, pane: str) -> None:
        super().__init__()
        self._panes = [pane, *(other for other in ("bench", "app", "prompt", "adapters", "reply") if other != pane)]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            for pane in self._panes:
                yield Static(Content.assemble((PANE_TITLES[pane], "bold $accent")), classes="help-title", markup=False)
                for keys, text in help_lines(pane):
                    with Horizontal(classes="help-line"):
                        yield Static(Content(keys), classes="help-keys", markup=False)
                        yield Static(Content(text), classes="help-text", markup=False)

    def action_close(self) -> None:
        self.dismiss()

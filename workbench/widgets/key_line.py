"""The last line of the screen: the keys of the focused pane; on a narrow terminal without those that can be spared."""
from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Footer

SPARED = ("type_scale", "engine", "bypass", "newline", "solo", "regenerate", "again", "want('add')", "want('export')",
          "compare")
"""actions whose keys leave first, in this order; F1 and the palette have all of them"""
LAST = ("f1", "escape")
"""keys that leave when all others did"""


class KeyLine(Footer):
    """A compact footer of which nothing is cut off. A screen with `footer_tells(action)` says which keys mean something now."""

    def __init__(self) -> None:
        super().__init__(compact=True)
        self._composed_for = 0
        """columns"""
        self._asked_for: tuple[object, ...] = ()
        """keys that are drawn, or will be"""

    def bindings_changed(self, screen: Screen) -> None:
        """Draw the keys anew where they are others than before: a change of the focus tells it twice, and every widget of a screen once."""
        tells = getattr(screen, "footer_tells", lambda action: True)
        active = screen.active_bindings.items()
        keys = tuple((key, each.binding.action, each.enabled, tells(each.binding.action)) for key, each in active if each.binding.show)
        if keys != self._asked_for and self.is_attached and screen is self.screen and self.app.app_focus:
            self._asked_for = keys
            super().bindings_changed(screen)

    def compose(self) -> ComposeResult:
        self.mutate_reactive(Footer.compact)  # which lets go of the keys of before: they listen to it
        self._composed_for = self.app.size.width
        keys: list[Any] = list(super().compose())
        if tells := getattr(self.screen, "footer_tells", None):
            keys = [key for key in keys if tells(key.action)]
        for key in sorted(reversed(keys), key=_spared_before):
            if sum(map(_columns, keys)) + 1 > self._composed_for and not key.has_class("-command-palette"):  # before which a border stands
                keys.remove(key)
        yield from keys

    def on_resize(self, event: events.Resize) -> None:
        if event.size.width != self._composed_for:  # new keys in it are a resize too
            self.call_after_refresh(self.recompose)


def _spared_before(key: Any) -> tuple[int, int]:
    """The order in which keys leave: those that can be spared, others from the right, and what helps and leads back."""
    if key.action in SPARED:
        return 0, SPARED.index(key.action)
    return (2, LAST.index(key.key)) if key.key in LAST else (1, 0)


def _columns(key: Any) -> int:
    """Of a FooterKey, which textual does not export: the key, its label and the gaps behind both."""
    return cell_len(key.key_display) + cell_len(key.description) + 2

"""A screen that is told of two sizes at once settles on the one that the terminal has."""
from __future__ import annotations

from textual import events
from textual.command import CommandPalette


class SteadySize:
    """Beside a Screen class, before it: sizes that the terminal had, but has no more, are not laid out.

    A screen that lays out a size posts that size to itself. Two of them on their way would call each other up for ever.
    """

    def _on_resize(self, event: events.Resize) -> None:
        if event.size != self.app.size:
            event.stop()
            event.prevent_default()


class Palette(SteadySize, CommandPalette):
    """The command palette, which is a screen too."""

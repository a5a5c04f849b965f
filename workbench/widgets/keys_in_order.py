"""Text fields whose keys act in the order they were pressed."""
from __future__ import annotations

from typing import TYPE_CHECKING

from textual import events
from textual.widgets import Input

from ..text import clean_line, size_text

if TYPE_CHECKING:
    from textual.widget import Widget

    _Field = Widget
else:
    _Field = object


class KeysInOrder(_Field):
    """Carries a field's bindings out at the key. Otherwise they run once the key came back up to the app, after letters typed behind it."""

    async def _on_key(self, event: events.Key) -> None:
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            if not binding.priority:
                event.prevent_default()
                event.stop()
                await self.run_action(binding.action)
                return


class LineField(KeysInOrder, Input):
    """One line of text. What is pasted becomes one line; what is too long is not taken, and said."""

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        most = self.max_length or len(event.text)
        if len(event.text) + len(self.value) > most:
            size = size_text(len(event.text))
            self.app.notify(f"not pasted: {size} of text, this field holds {most} characters", severity="warning", markup=False)
        else:
            self.replace(clean_line(" ".join(event.text.split("\n")), most + 1), *sorted(self.selection))

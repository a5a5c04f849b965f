"""The mix of one column of the compare screen: the adapter list over the column's own board."""
from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from ..compare_state import Lane
from ..control import Control
from ..keys import bindings
from ..mixboard import MixBoard, mix_text
from ..panels.engine import title
from ..text import clean_line
from .adapter_list import AdapterList
from .ask import Ask
from .mix_keys import MixKeys


class MixEditor(MixKeys, Vertical):
    """Keys of the adapter pane, for the lane that `edit` was called with."""

    BINDINGS = bindings("mix")

    class Changed(Message):
        """The mix of the column changed: show it now."""

    def __init__(self, control: Control) -> None:
        super().__init__(id="mix-editor")
        self._control = control
        self.lane: Lane | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="mix-title", markup=False)
        yield AdapterList()

    def edit(self, lane: Lane) -> None:
        """Show the mix of a column and take the keys."""
        self.lane, self.display = lane, True
        self.show()
        self.screen.set_focus(self.query_one(AdapterList))  # at once: the next key is for it

    def show(self) -> None:
        if self.lane is None or not self.display:
            return
        mix = clean_line(mix_text(self.lane.board.mix()), max(self.size.width - 20, 20))
        self.query_one("#mix-title", Static).update(title(f"MIX OF {self.lane.label}", mix), layout=False)
        self.query_one(AdapterList).show(self._control.state, self.lane.board)

    @on(AdapterList.Toggled)
    def _clicked_box(self, event: AdapterList.Toggled) -> None:
        self.change(lambda board: board.toggle(event.name))

    @on(AdapterList.Scaled)
    def _dragged(self, event: AdapterList.Scaled) -> None:
        self.change(lambda board: board.set_scale(event.name, event.scale, joined=event.dragging))

    def action_chat(self) -> None:
        if self.lane:
            self._control.comparing.take_chats_mix(self.lane)
            self.post_message(self.Changed())

    # -- what the keys act on -------------------------------------------------------------------
    @property
    def mix_board(self) -> MixBoard | None:
        return self.lane.board if self.lane else None

    @property
    def asker(self) -> Ask:
        return self.screen.query_one(Ask)

    @property
    def whose(self) -> str:
        return f" in column {self.lane.label}" if self.lane else ""

    def hint(self, text: str) -> None:
        self._control.comparing.compare.hint = text

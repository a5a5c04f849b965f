"""The mix of one column of the compare screen: the adapter list over the column's own board."""
from __future__ import annotations

from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Static

from ..compare_state import Lane
from ..control import Control
from ..keys import bindings
from ..mixboard import MixBoard, mix_text, parse_scale, scale_text
from ..panels.engine import title
from ..text import clean_line
from .adapter_list import AdapterList
from .ask import Ask
from .scale_bar import on_grid


class MixEditor(Vertical):
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
        self._board(lambda board: board.toggle(event.name))

    @on(AdapterList.Scaled)
    def _dragged(self, event: AdapterList.Scaled) -> None:
        self._board(lambda board: board.set_scale(event.name, event.scale, joined=event.dragging))

    # -- keys -----------------------------------------------------------------------------------
    def action_cursor(self, by: int) -> None:
        self.query_one(AdapterList).move(by)

    def action_toggle(self) -> None:
        self._here(lambda board, name: board.toggle(name))

    def action_nudge(self, by: float) -> None:
        self._here(lambda board, name: board.set_scale(name, on_grid(board[name].scale + by, 0.01)))

    def action_set_scale(self, scale: float) -> None:
        self._here(lambda board, name: board.set_scale(name, float(scale)))

    def action_solo(self) -> None:
        self._here(lambda board, name: board.toggle_solo(name))

    def action_bypass(self) -> None:
        self._board(lambda board: board.toggle_bypass())

    def action_undo(self) -> None:
        self._board(lambda board: board.undo())

    def action_redo(self) -> None:
        self._board(lambda board: board.redo())

    def action_chat(self) -> None:
        if self.lane:
            self._control.comparing.take_chats_mix(self.lane)
            self.post_message(self.Changed())

    def action_type_scale(self) -> None:
        row, lane = self.query_one(AdapterList).current, self.lane
        if row is None or lane is None:
            return

        def take(text: str) -> str | None:
            try:
                scale = parse_scale(text)
            except ValueError as error:
                return str(error)
            if row.name in lane.board:  # it may have been unloaded since
                lane.board.set_scale(row.name, scale)
            self.post_message(self.Changed())
            return None

        self.screen.query_one(Ask).ask(f"scale of {row.name} in column {lane.label}", scale_text(lane.board[row.name].scale), take)

    # -- inside ---------------------------------------------------------------------------------
    def _here(self, change: Callable[[MixBoard, str], object]) -> None:
        row = self.query_one(AdapterList).current
        if row is not None and self.lane and row.name in self.lane.board:
            self._board(lambda board: change(board, row.name))

    def _board(self, change: Callable[[MixBoard], object]) -> None:
        if self.lane:
            change(self.lane.board)
            self.post_message(self.Changed())

"""The list of adapters: one line each, drawn from the store; keys act on the line of the cursor, the mouse on any."""
from __future__ import annotations

from dataclasses import dataclass

from rich.cells import set_cell_size
from rich.segment import Segment
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ...engine.protocol import AdapterLoading
from ..mixboard import MixBoard, scale_text
from ..reload_text import FILE_MARKS
from ..state import BenchState
from ..text import clean_line, counted
from . import scale_bar

_BOX = 4
_TAIL = 13
"""columns after the bar: value, place, flags"""


@dataclass(frozen=True)
class Row:
    """What one line shows."""

    name: str
    on: bool
    acts: bool
    scale: float
    place: str
    flags: str


def rows_of(state: BenchState, board: MixBoard) -> list[Row]:
    """The lines of the list, in the order of the board."""
    return [_row(state, board, name) for name in board.names]


def _row(state: BenchState, board: MixBoard, name: str) -> Row:
    setting, view = board[name], state.view(name)
    if name in state.reloading:
        place = _share(state.reading) if state.reading and state.reading.name == name else "…"
    elif name in state.failed:
        place = "✗"
    elif view:
        place = "…" if view.reading else f"G{view.slot}" if view.tier == "slot" else view.tier
    else:
        place = "–" if state.engine == "gone" else "host" if name in state.adapters else "…"
    info = state.adapters.get(name)
    flags = FILE_MARKS.get(view.file, "") if view else ""
    flags += "⚑" if info and info.invocation else ""
    flags += "▪" if view and view.pinned else ""
    flags += "!" if info and info.notes else ""
    flags += "S" if board.now.solo == name else ""
    return Row(name, setting.on, board.acts(name) and name in state.adapters, setting.scale, place, flags)


def _share(reading: AdapterLoading) -> str:
    return f"{reading.done / reading.total:.0%}" if reading.total > 0 else "…"


class AdapterList(ScrollView, can_focus=True):
    """Lines `[x] name  bar  +0.75  G0 ⚑`. Posts what the mouse does; the panel's keys do the rest."""

    COMPONENT_CLASSES = {"list--cursor", "list--quiet", "list--bad"}

    cursor: reactive[int] = reactive(0)

    class Toggled(Message):
        """The box of an adapter was clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class Scaled(Message):
        """The bar of an adapter was clicked or dragged to a scale."""

        def __init__(self, name: str, scale: float, dragging: bool) -> None:
            super().__init__()
            self.name, self.scale, self.dragging = name, scale, dragging

    class Moved(Message):
        """The cursor stands on another adapter."""

    def __init__(self) -> None:
        super().__init__(id="adapter-list")
        self.rows: list[Row] = []
        self._empty = ""
        self._follows = False
        """the cursor goes to the next adapter that is added"""
        self._dragged: str | None = None

    @property
    def current(self) -> Row | None:
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def show(self, state: BenchState, board: MixBoard) -> None:
        """Bring the lines to the store, with the settings of `board`."""
        rows = rows_of(state, board)
        waits = counted(len(state.wanted), "adapter")
        empty = "no adapters: a adds one" if not state.wanted else f"{waits} to read" + ("" if state.model else ", after the model")
        if rows == self.rows and empty == self._empty:
            return
        self._empty = empty
        if len(rows) != len(self.rows):
            self.virtual_size = Size(1, len(rows))
            self.styles.height = max(len(rows), 1)
        if self._follows and len(rows) > len(self.rows):
            self._follows, self.cursor = False, len(self.rows)
        self.rows = rows
        self.cursor = min(self.cursor, max(len(rows) - 1, 0))
        self.refresh()

    def follow_new(self) -> None:
        """Go to the adapter that is added next."""
        self._follows = True

    def watch_cursor(self) -> None:
        self._keep_cursor_seen()
        self.refresh()
        self.post_message(self.Moved())

    def move(self, by: int) -> None:
        self.cursor = min(max(self.cursor + by, 0), max(len(self.rows) - 1, 0))

    def render_line(self, y: int) -> Strip:
        index = y + round(self.scroll_offset.y)
        width = self.scrollable_content_region.width
        if not self.rows and index == 0:
            return self._strip(self._empty, width, "list--quiet")
        if index >= len(self.rows):
            return Strip.blank(width, self.rich_style)
        row = self.rows[index]
        name = "list--cursor" if index == self.cursor and self.has_focus else ""
        name = name or ("list--bad" if row.place == "✗" else "" if row.acts else "list--quiet")
        return self._strip(self._line(row, index == self.cursor), width, name)

    def _strip(self, text: str, width: int, component: str) -> Strip:
        style = self.get_component_rich_style(component) if component else self.rich_style
        return Strip([Segment(text, style)]).adjust_cell_length(width, style)

    def _line(self, row: Row, here: bool) -> str:
        name_width, bar_width = self._widths()
        name = clean_line(row.name, name_width)
        drawn = scale_bar.bar(row.scale, row.acts, bar_width) + " " if bar_width else ""
        sign = "+" if row.scale >= 0 else ""
        value = f"{sign}{scale_text(row.scale)}"[:7]
        box = "[x]" if row.on else "[ ]"
        return f"{box}{'▸' if here else ' '}{set_cell_size(name, name_width)} {drawn}{value:<5} {row.place:<4}{row.flags}"

    def _widths(self) -> tuple[int, int]:
        """Columns of the name and of the bar: the bar goes first when the pane is narrow."""
        free = self.scrollable_content_region.width - _BOX - _TAIL - 1
        bar_width = 13 if free >= 30 else scale_bar.WIDTH if free >= 18 else 7 if free >= 14 else 0
        return max(free - bar_width - (1 if bar_width else 0), 6), bar_width

    def _keep_cursor_seen(self) -> None:
        top, height = round(self.scroll_offset.y), max(self.scrollable_content_region.height, 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        index = event.y + round(self.scroll_offset.y)
        if not 0 <= index < len(self.rows):
            return
        self.cursor = index
        name_width, bar_width = self._widths()
        start = _BOX + name_width + 1
        if event.x < _BOX - 1:
            self.post_message(self.Toggled(self.rows[index].name))
        elif start <= event.x < start + bar_width:
            self._dragged = self.rows[index].name
            self.capture_mouse()
            self._drag(event.x, dragging=False)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragged is not None:
            self._drag(event.x, dragging=True)

    def on_mouse_up(self) -> None:
        if self._dragged is not None:
            self._dragged = None
            self.release_mouse()

    def _drag(self, x: int, dragging: bool) -> None:
        name_width, bar_width = self._widths()
        scale = scale_bar.scale_at(x - _BOX - name_width - 1, bar_width)
        self.post_message(self.Scaled(self._dragged, scale, dragging))

"""The columns of the compare screen: texts side by side, what differs marked, scrolled together."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from ...engine.protocol import Mix
from ..compare_state import MOST_COLUMNS, Run
from ..compare_text import LIVE_DIFF_CHARACTERS, changes, mix_line, row_lines, stale_marks
from ..compare_text import marked as marked_text
from ..comparison_row import Row
from ..control import Control
from ..keys import bindings
from ..mixboard import mix_text
from ..styles import QUIET
from ..text import clean, clean_line
from ..word_diff import Change

LEAST_WIDTH = 38
"""columns of a terminal that a text needs beside others"""
SIDES = ("left", "right")


@dataclass(frozen=True)
class Side:
    """What one column shows. `label` is its letter, "" while it has no name."""

    label: str
    title: Content
    row: Row | None
    lines: tuple[Content, ...]

    @property
    def text(self) -> str:
        return clean(self.row.text) if self.row else ""


def sides_of(control: Control) -> list[Side]:
    """The columns from left to right: those that are set, or the pair of a blind run."""
    compare = control.comparing.compare
    run = compare.run
    if run and run.blind and compare.blind:
        return [_blind_side(control, run, place) for place in range(2)]
    return [_side(control, lane.label, lane.board.mix(), run.row(lane.label) if run else None, run) for lane in compare.lanes]


def _blind_side(control: Control, run: Run, place: int) -> Side:
    row = run.rows[run.order[place]]
    if run.hidden:
        return Side("", Content.assemble((f"{place + 1}  {SIDES[place]}", "bold")), row, tuple(row_lines(row, named=False)))
    mark = " ◂ your vote" if run.choice == ("first", "second")[place] else ""
    name = mix_line(row.column.label, row.column.mix, stale_marks(run, control.state.adapters))
    title = Content.assemble((name, "bold"), (mark, "$accent"))
    return Side(row.column.label, title, row, tuple(row_lines(row)))


def _side(control: Control, label: str, mix: Mix, row: Row | None, run: Run | None) -> Side:
    missing = [use.name for use in mix if use.name not in control.state.adapters]
    title = Content.assemble((mix_line(label, mix), "bold"), ("  ✗ not loaded" if missing else "", "$text-error"))
    if row is None or run is None:
        return Side(label, title, None, (Content.assemble(("Enter in the prompt asks all columns", QUIET)),))
    lines, marks = row_lines(row), stale_marks(run, control.state.adapters)
    if row.column.mix != mix or marks.keys() & {use.name for use in mix}:
        made_with = clean_line(mix_text(row.column.mix, marks), 200)
        lines = [Content.assemble((f"made with {made_with}: Ctrl+R asks again", "$text-warning")), *lines]
    return Side(label, title, row, tuple(lines))


class CompareColumn(Vertical, can_focus=True):
    """One text under its title, with its figures below. It follows the end of a text that is written until it is scrolled up."""

    class Scrolled(Message):
        """Its text was scrolled."""

        def __init__(self, column: CompareColumn) -> None:
            super().__init__()
            self.column = column

    def __init__(self, place: int) -> None:
        super().__init__(id=f"column-{place}", classes="compare-column")
        self.place = place
        self._drawn: list = []

    def compose(self) -> ComposeResult:
        yield Static("", classes="column-title", markup=False)
        with VerticalScroll(classes="column-scroll", can_focus=False):
            yield Static("", classes="column-text", markup=False)
        yield Static("", classes="column-lines", markup=False)

    def on_mount(self) -> None:
        self.watch(self.scroll, "scroll_y", lambda: self.post_message(self.Scrolled(self)), init=False)

    @property
    def scroll(self) -> VerticalScroll:
        return self.query_one(VerticalScroll)

    def on_click(self, event: events.Click) -> None:
        self.focus()

    def show(self, side: Side, text: Content) -> bool:
        """Draw it; whether its text was at its end and grew, so that it should be followed."""
        lines = Content("\n").join(side.lines)
        drawn = [(content.plain, content.spans) for content in (side.title, lines, text)]  # contents are equal when their plain texts are
        before, self._drawn = self._drawn or [None] * 3, drawn
        for place, (name, content) in enumerate((("title", side.title), ("lines", lines))):
            if before[place] != drawn[place]:
                self.query_one(f".column-{name}", Static).update(content)
        if before[2] == drawn[2]:
            return False
        at_end = self.scroll.scroll_y >= self.scroll.max_scroll_y - 1
        self.query_one(".column-text", Static).update(text)
        return at_end and side.row is not None and side.row.active

    def line_of(self, text: str, end: int) -> int:
        """The line on which the character before `end` is drawn."""
        width = max(self.query_one(".column-text", Static).content_size.width, 1)
        return max(Content(text[:max(end, 1)]).get_height({}, width) - 1, 0)


class Columns(Horizontal):
    """Up to four columns; on a narrow terminal the first and the current one. Keys act on the column that has the focus."""

    BINDINGS = bindings("columns")

    class Changed(Message):
        """Something of a comparison changed: show it now."""

    def __init__(self, control: Control, want: Callable[[str], None]) -> None:
        """`want` is called, at the key, with what is more than a column's to do: the next key may be for what it opens."""
        super().__init__(id="compare-columns")
        self._control, self._want = control, want
        self._sides: list[Side] = []
        self.current = 0
        """place of the column that keys act on"""
        self.linked = True
        self._moving = False
        self._at = -1
        """the difference that n and N came to last"""

    def compose(self) -> ComposeResult:
        for place in range(MOST_COLUMNS):
            yield CompareColumn(place)

    @property
    def sides(self) -> list[Side]:
        return self._sides or sides_of(self._control)

    @property
    def other(self) -> int:
        """Place of the column that the first is compared with: the current one, or the second."""
        return self.current or min(1, len(self._sides) - 1)

    def column(self, place: int) -> CompareColumn:
        return self.query_one(f"#column-{place}", CompareColumn)

    def shown(self) -> list[int]:
        """Places that there is room for: the first, and those up to the current one."""
        count = len(self._sides)
        room = min(max(self.app.size.width // LEAST_WIDTH, 1), count)
        if room == 1:
            return [self.current]
        last = max(self.current, room - 1)
        return [0, *range(last - room + 2, last + 1)]

    def show(self) -> None:
        """Bring the columns to the comparison."""
        self._sides = sides_of(self._control)
        self.current = min(self.current, len(self._sides) - 1)
        shown, found = self.shown(), self._differences()
        for place in range(MOST_COLUMNS):
            column = self.column(place)
            column.display = place in shown
            if place in shown:
                spans = [(change.first_start, change.first_end) if place == 0 else (change.second_start, change.second_end)
                         for change in found.get(place or self.other, ())]
                here = self._at if place in (0, self.other) else -1
                if column.show(self._sides[place], marked_text(self._sides[place].text, spans, here)):
                    self.call_after_refresh(self._follow, column)
        focused = self.screen.focused
        if isinstance(focused, CompareColumn) and focused.place not in shown:
            self.screen.set_focus(self.column(self.current))

    def _differences(self) -> dict[int, Sequence[Change]]:
        """By place, where its text and the first one differ; a text that is still written and long is not looked at yet."""
        if not self._sides or self._sides[0].row is None:
            return {}
        first = self._sides[0]
        ready = [place for place, side in enumerate(self._sides) if place and side.row
                 and (not (side.row.active or first.row.active) or len(side.text) + len(first.text) < LIVE_DIFF_CHARACTERS)]
        return {place: changes(first.text, self._sides[place].text) for place in ready}

    def _follow(self, column: CompareColumn) -> None:
        self._moving = True
        column.scroll.scroll_end(animate=False, immediate=True)
        self._moving = False

    @on(CompareColumn.Scrolled)
    def _scrolled(self, event: CompareColumn.Scrolled) -> None:
        """The others go along, while they are linked."""
        if self.linked and not self._moving and (event.column.has_focus or event.column.is_mouse_over):
            self._scroll_all(event.column.scroll.scroll_y, but=event.column)

    def _scroll_all(self, y: float, but: CompareColumn | None = None) -> None:
        self._moving = True
        for place in self.shown():
            if (column := self.column(place)) is not but:
                column.scroll.scroll_to(y=y, animate=False, immediate=True)
        self._moving = False

    @on(events.DescendantFocus)
    def _focused(self, event: events.DescendantFocus) -> None:
        if isinstance(event.widget, CompareColumn) and self.current != event.widget.place:
            self.current, self._at = event.widget.place, -1
            self.post_message(self.Changed())

    def focus_side(self, place: int) -> None:
        """Make a column the current one, seen and with the keys."""
        if place != self.current:
            self.current, self._at = place, -1
        self.show()
        self.screen.set_focus(self.column(place))

    # -- keys -----------------------------------------------------------------------------------
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        return action not in ("blind", "names") or self._control.comparing.compare.blind == (action == "names")

    def action_side(self, by: int) -> None:
        self.focus_side((self.current + by) % max(len(self._sides), 1))

    def action_scroll(self, by: int) -> None:
        """By lines; by pages where it is more than one line."""
        scroll = self.column(self.current).scroll
        height = max(scroll.size.height - 1, 1)
        y = scroll.scroll_y + (by if abs(by) == 1 else height * (1 if by > 0 else -1))
        if abs(by) > 100:
            y = 0 if by < 0 else scroll.max_scroll_y
        if self.linked:
            self._scroll_all(max(y, 0))
        else:
            scroll.scroll_to(y=y, animate=False)

    def action_difference(self, by: int) -> None:
        """To the next or the last place where the first text and the current one differ, in both."""
        found = self._differences().get(self.other, ())
        if not found:
            self._hint("there are no replies to compare yet" if not self._sides[0].row else "no word differs here")
            return
        self._at = (self._at + by) % len(found) if self._at >= 0 else (0 if by > 0 else len(found) - 1)
        change = found[self._at]
        lines = {0: self.column(0).line_of(self._sides[0].text, change.first_end),
                 self.other: self.column(self.other).line_of(self._sides[self.other].text, change.second_end)}
        self._moving = True
        for place, line in lines.items():
            scroll = self.column(place).scroll
            scroll.scroll_to(y=max(line - scroll.size.height // 2, 0), animate=False, immediate=True)
        self._moving = False
        self._hint(f"difference {self._at + 1} of {len(found)}")

    def action_lock(self) -> None:
        self.linked = not self.linked
        self._hint("columns scroll together" if self.linked else "every column scrolls by itself; y links them again")

    def action_want(self, what: str) -> None:
        self._want(what)
        self.post_message(self.Changed())

    def action_vote(self, number: int) -> None:
        self._control.comparing.vote(("first", "second", "tie", "bad")[number - 1])
        self.post_message(self.Changed())

    def action_blind(self) -> None:
        self._control.comparing.toggle_blind()
        self.post_message(self.Changed())

    action_names = action_blind

    def action_toggle_sampling(self) -> None:
        self._control.toggle_sampling()
        self._hint(self._control.state.hint)
        self._control.state.hint = ""

    def _hint(self, text: str) -> None:
        self._control.comparing.compare.hint = text
        self.post_message(self.Changed())

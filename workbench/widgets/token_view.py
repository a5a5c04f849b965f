"""The first column's reply token by token, marked by how far two mixes are apart before each; a cursor chooses one."""
from __future__ import annotations

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Region
from textual.message import Message
from textual.widgets import Static

from ..compare_state import Run
from ..keys import bindings
from ..panels.engine import title
from ..text import clean_line

APART, FAR = 0.1, 1.0
"""nats from which on a token is underlined, and bold"""


class TokenView(VerticalScroll, can_focus=True):
    """Keys move the cursor; what stands under it is told by the screen's figures."""

    BINDINGS = bindings("tokens")

    class Moved(Message):
        """The cursor stands on another token, or another column is looked at."""

    class Closed(Message):
        """Back to the columns."""

    def __init__(self) -> None:
        super().__init__(id="token-view")
        self.cursor = 0
        self.other = 1
        """index of the column that the first is compared with"""
        self._run: Run | None = None
        self._places: list[tuple[int, int]] = []
        """line and cell of every token"""

    def compose(self) -> ComposeResult:
        yield Static("", classes="token-title", markup=False)
        yield Static("", classes="token-text", markup=False)

    def on_resize(self) -> None:
        if self.display and self._run:
            self.show(self._run)

    def show(self, run: Run | None) -> None:
        """Draw the tokens of a run that has figures."""
        if run is not self._run:
            self._run, self.cursor = run, 0
        if run is None or run.scored is None:
            self.query_one(".token-text", Static).update(Content("no figures yet"))
            return
        self.other = min(max(self.other, 1), len(run.rows) - 1)
        self.cursor = min(self.cursor, max(len(run.scored.tokens) - 1, 0))
        first, other = run.setup.columns[0].label, run.setup.columns[self.other].label
        rest = f"KL({first}‖{other}) before each: underlined from {APART:g} nats, bold from {FAR:g}"
        self.query_one(".token-title", Static).update(title(f"TOKENS OF {first}", rest), layout=False)
        self.query_one(".token-text", Static).update(self._text(run))
        line = self._places[self.cursor][0] if self._places else 0
        self.scroll_to_region(Region(0, line, 1, 3), animate=False, immediate=True)

    def _text(self, run: Run) -> Content:
        """Tokens one behind the other, broken where a line is full or where a token ends one; blanks that would not be seen are shown."""
        width, kl = max(self.content_size.width - 1, 10), run.scored.rows[self.other].kl
        parts: list[tuple[str, str]] = []
        line = cell = 0
        self._places = []
        for index, token in enumerate(run.scored.tokens):
            text = clean_line(token.text, 60) or f"<{token.id}>"
            size = cell_len(text)
            if cell and cell + size > width:
                parts.append(("\n", ""))
                line, cell = line + 1, 0
            self._places.append((line, cell))
            style = "bold underline $text-warning" if kl[index] >= FAR else "underline $text-warning" if kl[index] >= APART else ""
            parts.append((text, "reverse bold" if index == self.cursor else style))
            cell += size
            if token.text.endswith("\n"):
                parts.append(("\n", ""))
                line, cell = line + 1, 0
        return Content.assemble(*parts)

    # -- keys -----------------------------------------------------------------------------------
    def action_move(self, by: int) -> None:
        self._go(self.cursor + by)

    def action_line(self, by: int) -> None:
        """To the token above or below."""
        if self._places:
            line, cell = self._places[self.cursor]
            there = [(abs(place[1] - cell), index) for index, place in enumerate(self._places) if place[0] == line + by]
            self._go(min(there)[1] if there else self.cursor)

    def action_apart(self, by: int) -> None:
        """To the next token before which the mixes are apart."""
        scored = self._run.scored if self._run else None
        far = [index for index, kl in enumerate(scored.rows[self.other].kl) if kl >= APART] if scored else []
        ahead = [index for index in far if (index > self.cursor if by > 0 else index < self.cursor)]
        if ahead:
            self._go(ahead[0] if by > 0 else ahead[-1])

    def action_other(self) -> None:
        if self._run:
            self.other = self.other % (len(self._run.rows) - 1) + 1
            self.post_message(self.Moved())

    def action_close(self) -> None:
        self.post_message(self.Closed())

    def _go(self, index: int) -> None:
        tokens = len(self._run.scored.tokens) if self._run and self._run.scored else 0
        self.cursor = min(max(index, 0), max(tokens - 1, 0))
        self.post_message(self.Moved())

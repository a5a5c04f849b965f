"""What is told of a comparison, under its columns."""
from __future__ import annotations

from textual.content import Content

from ..compare_text import run_lines, token_lines, votes_line
from ..control import Control
from ..styles import QUIET
from ..widgets.token_view import TokenView
from .engine import Panel

EMPTY = "Type a prompt: all columns answer it together. Tab goes to the columns, m there sets a mix."
BLIND = "blind: whose replies these are is told after your vote"
VOTES = "Tab goes to the columns, there: 1 the left one is better · 2 the right one · 3 a tie · 4 both bad"


class Figures(Panel):
    """The figures of a run, or of one of its tokens."""

    WRAPS = True

    def show(self, control: Control, tokens: TokenView | None, other: str) -> None:
        """`other`: label of the column of which alone there is room to tell beside the first; "" tells of all."""
        run = control.comparing.compare.run
        if run is None:
            self.put([Content.assemble((EMPTY, QUIET))])
        elif run.hidden:
            self.put([BLIND if run.active else VOTES])
        elif tokens:
            self.put(list(token_lines(run, tokens.other, tokens.cursor, self.columns)))
        else:
            labels = run.setup.columns[0].label, run.setup.columns[1].label
            index = next((i for i, column in enumerate(run.setup.columns) if i and column.label == other), None)
            self.put([*run_lines(run, self.columns, index), Content.assemble((votes_line(run.tally, labels), QUIET))])

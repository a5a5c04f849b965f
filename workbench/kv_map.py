"""A map of KV memory: a letter for each mix, upper case where a reply holds the block, lower case where it is only kept, a dot where free.

What several replies hold is drawn reversed.
"""
from __future__ import annotations

from itertools import groupby

from textual.content import Content

from ..engine.protocol import KvRun, KvView
from .mix_letters import OTHERS, MixLetters

FREE, KEPT, HELD, SHARED = range(4)
"""kinds of blocks; of a cell that stands for several the highest is drawn"""
_STYLES = {FREE: "$foreground 50%", KEPT: "$foreground 75%", HELD: "bold $accent", SHARED: "bold reverse $accent"}


def kind_of(run: KvRun) -> int:
    if run.mix < 0:
        return FREE
    return SHARED if len(run.requests) > 1 else HELD if run.requests else KEPT


def map_lines(view: KvView, letters: MixLetters, width: int, rows: int) -> list[Content]:
    """At most `rows` lines of at most `width` cells; free blocks behind the last used one are not drawn. No line when nothing is used."""
    used = max((run.first + run.count for run in view.runs if run.mix >= 0), default=0)
    if not used:
        return []
    per_cell = -(-used // (width * rows))
    cells = _cells(view, letters, used, per_cell)
    return [_line(cells[start:start + width]) for start in range(0, len(cells), width)]


def scale_text(view: KvView, width: int, rows: int) -> str:
    """What a cell of `map_lines` stands for, and what is not drawn: `a cell is 2 blocks; 1,792 more are free`."""
    used = max((run.first + run.count for run in view.runs if run.mix >= 0), default=0)
    per_cell = -(-used // (width * rows)) if used else 1
    free = view.blocks - used
    cell = "a letter is a block" if per_cell == 1 else f"a letter is {per_cell} blocks"
    return cell + (f"; {free:,} more are free" if free else "")


def _cells(view: KvView, letters: MixLetters, used: int, per_cell: int) -> list[tuple[str, int]]:
    """(character, kind) of every cell up to block `used`."""
    cells = [("·", FREE)] * -(-used // per_cell)
    for run in view.runs:
        kind = kind_of(run)
        if kind == FREE:
            continue
        letter = letters[view.mixes[run.mix]] if run.mix < len(view.mixes) else OTHERS
        cell = letter if kind >= HELD else letter.lower(), kind
        for index in range(run.first // per_cell, (run.first + run.count - 1) // per_cell + 1):
            if kind > cells[index][1]:
                cells[index] = cell
    return cells


def _line(cells: list[tuple[str, int]]) -> Content:
    return Content.assemble(*(("".join(char for char, _ in run), _STYLES[kind]) for kind, run in groupby(cells, key=lambda cell: cell[1])))

"""Text broken into lines by the columns that it takes: wide characters take two."""
from __future__ import annotations

from rich.cells import cell_len, chop_cells


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most `width` columns; the first begins with `first`, the others with `rest`. Where these leave no room lines are longer.

    Lines break at blanks; a word that no line holds goes on where it stands and is broken at their ends.
    """
    lines, line, empty = [], first, True
    for word in text.split():
        gap = "" if empty else " "
        room = width - cell_len(line) - len(gap)
        if cell_len(word) > room and (cell_len(rest) + cell_len(word) <= width or room < 2) and not empty:
            lines, line, gap = [*lines, line], rest, ""
            room = width - cell_len(line)
        while cell_len(word) > (room := max(room, 2)):
            piece = chop_cells(word, room)[0]
            lines, line, word = [*lines, line + gap + piece], rest, word[len(piece):]
            room, gap = width - cell_len(rest), ""
        line, empty = line + gap + word, False
    return [*lines, line] if line.strip() or not lines else lines

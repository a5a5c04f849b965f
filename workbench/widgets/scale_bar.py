"""A scale from -2 to +2 as a bar of characters: drawing it, and which scale a column stands for."""
from __future__ import annotations

LOW, HIGH = -2.0, 2.0
STEP = 0.05
WIDTH = 11


def bar(scale: float, acts: bool, width: int = WIDTH) -> str:
    """The bar of `width` cells: zero marked, filled from zero to the knob; ● acts, ○ does not, ◀ ▶ beyond the ends."""
    cells = ["─"] * width
    zero, knob = _column(0.0, width), _column(scale, width)
    for column in range(min(zero, knob), max(zero, knob)):
        cells[column] = "━"
    cells[zero] = "┼"
    cells[knob] = "▶" if scale > HIGH else "◀" if scale < LOW else "●" if acts else "○"
    return "".join(cells)


def scale_at(column: int, width: int = WIDTH) -> float:
    """The scale of a column, on the grid of 0.05; columns outside are the ends."""
    share = min(max(column / (width - 1), 0.0), 1.0)
    return on_grid(LOW + share * (HIGH - LOW))


def on_grid(scale: float, step: float = STEP) -> float:
    """The nearest multiple of `step`, without the dust of binary fractions; never -0."""
    return round(round(scale / step) * step, 4) + 0.0


def _column(scale: float, width: int) -> int:
    share = (min(max(scale, LOW), HIGH) - LOW) / (HIGH - LOW)
    return round(share * (width - 1))

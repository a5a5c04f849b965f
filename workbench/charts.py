"""Small charts made of characters."""
from __future__ import annotations

from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_RISING = " " + _LEVELS
_EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR = _EIGHTHS[1:]
"""what bars are made of"""


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values, lowest ▁ for zero, highest █ for their maximum."""
    shown = [max(value, 0.0) for value in values[-width:]] if width > 0 else []
    top = max(shown, default=0.0)
    return "".join(_LEVELS[round(value / top * 7)] if top > 0 else _LEVELS[0] for value in shown)


def folded(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: neighbours are folded into their maximum."""
    count = len(values)
    if count <= width or width < 1:
        return list(values)
    edges = [count * i // width for i in range(width + 1)]
    return [max(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def hbar(share: float, width: int) -> str:
    """A bar of `width` cells filled to `share` in eighths of a cell, without trailing blanks."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def gauge(share: float, width: int) -> str:
    """A gauge of `width` cells: ▰ filled, ▱ empty; what is above zero shows at least one."""
    filled = min(width, max(round(share * width), 1 if share > 0 else 0))
    return "▰" * filled + "▱" * (width - filled)


def column_chart(values: Sequence[float], labels: Sequence[str], height: int = 8) -> list[str]:
    """Values (0 and above) as columns over their labels, `height` lines of them, with the axis of values at the left."""
    top, width = max(values, default=0.0), max(map(len, labels), default=0) + 1
    axis = [f"{top * level / height:.3g}" if level in (height, height // 2) else "0" if not level else "" for level in range(height + 1)]
    margin, lines = max(map(len, axis)), []
    for level in range(height, 0, -1):
        cells = [_eighth(value / top * height - level + 1 if top > 0 else 0.0) * max(width - 2, 1) for value in values]
        lines.append(f"{axis[level]:>{margin}} ┤" + "".join(f"{cell:>{width}}" for cell in cells))
    lines.append(f"{axis[0]:>{margin}} ┼" + "─" * (width * len(values)))
    lines.append(" " * (margin + 2) + "".join(f"{label:>{width}}" for label in labels))
    return [line.rstrip() for line in lines]


def _eighth(filled: float) -> str:
    """One cell filled from below to `filled`, of 0 to 1, in eighths."""
    return _RISING[round(min(max(filled, 0.0), 1.0) * 8)]

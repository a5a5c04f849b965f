"""The one place where untrusted text is made safe to show.

Everything from files, models and adapters passes here before it reaches the terminal: replies, names,
paths, metadata, errors, log lines, the window title. The map works a character at a time, so an escape
sequence that is split over two tokens is still broken.
"""
from __future__ import annotations

from collections.abc import Sequence

_REPLACEMENT = "�"
_C0 = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}
_C1 = dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT)
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)
_BIDI = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C])
_SEPARATORS = {0x2028: "\n", 0x2029: "\n"}
_BLOCK = {**_C0, 0x7F: "␡", **_C1, **_SURROGATES, **_BIDI, **_SEPARATORS}
_LINE = {**_BLOCK, 0x09: " ", 0x0A: "⏎", 0x2028: "⏎", 0x2029: "⏎"}


def clean(text: str) -> str:
    """Text of any number of lines that no terminal acts on: control characters become visible, bidi controls vanish."""
    return text.translate(_BLOCK)


def clean_line(text: str, limit: int = 200) -> str:
    """`clean` for one line of at most `limit` characters; newlines show as ⏎, what is cut off as …"""
    cut = text[:limit - 1] + "…" if len(text) > limit else text
    return cut.translate(_LINE)


def counted(count: int, thing: str) -> str:
    """`1 seq`, `2 seqs`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def number_format(dtype: str, weights: str) -> str:
    """`packed`, or `fp32, weights dense`."""
    return dtype if dtype == weights else f"{dtype}, weights {weights}"


def size_text(count: int) -> str:
    """Bytes for people: `38.5 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"

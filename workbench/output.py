"""What the command line prints: data on standard output, narration on standard error.

Text for a terminal is cleaned, so that a reply cannot act on it; text for a pipe or a file goes out as it is.
"""
from __future__ import annotations

import os
import sys

from .text import clean, clean_line, size_text


def write(text: str) -> None:
    """Data, at once. Raises BrokenPipeError when nobody reads any more."""
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def narrate(text: str) -> None:
    """One paragraph of narration."""
    sys.stderr.write(clean(text) + "\n")
    sys.stderr.flush()


def accept_any_text() -> None:
    """Characters that the streams' encoding lacks are replaced instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")


def leave_broken_pipe() -> None:
    """Point standard output nowhere, so that nothing more is said about a reader that went away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressLine:
    """Progress on standard error: one line rewritten in place on a terminal, one line a phase elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._phase = ""
        self._shown = False

    def show(self, phase: str, item: str, done: int, total: int) -> None:
        if self._live:
            share = f"{done / total:4.0%} of {size_text(total)}  " if total else ""
            sys.stderr.write(f"\r\x1b[K{clean_line(phase, 20)}  {share}{clean_line(item, 40)}")
            sys.stderr.flush()
            self._shown = True
        elif phase != self._phase:
            narrate(f"{phase}: {item}" + (f" ({size_text(total)})" if total else ""))
        self._phase = phase

    def clear(self) -> None:
        """Take the line away; narration may follow."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def as_lines(value: dict, indent: str = "") -> list[str]:
    """Plain data (as from JSON) as readable lines: `key: value`, nested and many-lined values indented below their key."""
    lines = []
    for key, item in value.items():
        label = f"{indent}{key}:"
        if isinstance(item, dict) and item:
            lines += [label, *as_lines(item, indent + "  ")]
        elif isinstance(item, str) and "\n" in item:
            lines += [label, *(f"{indent}  {line}" for line in item.splitlines())]
        else:
            lines.append(f"{label} {_plain(item)}")
    return lines


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None or value == {} else str(value)

"""What the command line prints: data on standard output, narration on standard error.

Text for a terminal is cleaned, so that a reply cannot act on it; text for a pipe or a file goes out as it is.
"""
from __future__ import annotations

import json
import os
import shutil
import sys

from .exit_codes import Failed
from .text import clean, clean_line, size_text


def write(text: str) -> None:
    """Data, at once. Raises BrokenPipeError when nobody reads any more."""
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def narrate(text: str) -> None:
    """One paragraph of what was asked to be said."""
    sys.stderr.write(clean(text) + "\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    """A warning or a failure: it names the program, as its line may stand among those of others."""
    narrate(f"lora-bench: {text}")


def fail(failed: Failed, as_json: bool) -> None:
    """The failure as a warning; with `as_json` also as the one document that standard output was to hold."""
    warn(str(failed))
    if as_json:
        try:
            write(json.dumps({"error": str(failed), "exit_code": failed.code}, ensure_ascii=False) + "\n")
        except BrokenPipeError:
            leave_broken_pipe()


def accept_any_text() -> None:
    """Characters that the streams' encoding lacks are replaced instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")


def leave_broken_pipe() -> None:
    """Point standard output nowhere, so that nothing more is said about a reader that went away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressLine:
    """Progress on standard error: on a terminal one line that is rewritten in place and taken away in the end.

    Elsewhere nothing is said, or with `lines` each text on a line of its own.
    """

    def __init__(self, lines: bool = False) -> None:
        self._live = sys.stderr.isatty()
        self._lines = lines
        self._shown = False

    def show(self, text: str) -> None:
        if self._live:
            sys.stderr.write(f"\r\x1b[K{clean_line(text, max(20, shutil.get_terminal_size().columns - 1))}")
            sys.stderr.flush()
            self._shown = True
        elif self._lines:
            narrate(text)

    def clear(self) -> None:
        """Take the line away; other text may follow."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def as_lines(value: dict, indent: str = "") -> list[str]:
    """Plain data (as from JSON) as readable lines: `key: value`, nested and many-lined values indented below their key."""
    lines = []
    for key, item in value.items():
        size = key.endswith("_bytes") and type(item) is int
        label = f"{indent}{key.removesuffix('_bytes') + '_size' if size else key}:"
        if isinstance(item, dict) and item:
            lines += [label, *as_lines(item, indent + "  ")]
        elif isinstance(item, str) and "\n" in item:
            lines += [label, *(f"{indent}  {line}" for line in item.splitlines())]
        else:
            lines.append(f"{label} {size_text(item) if size else _plain(item)}")
    return lines


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) if type(item) is int else _plain(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value in (None, "", {}) else str(value)


def progress_text(phase: str, item: str, done: int, total: int) -> str:
    """`weights  40% of 92.1 MiB  embed_tokens.weight`; without a share when `total` is 0."""
    share = f"{done / total:4.0%} of {size_text(total)}  " if total else ""
    return f"{phase}  {share}{item}"

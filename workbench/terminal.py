"""What the terminal can show, as far as it can be told without asking it."""
from __future__ import annotations

import locale
import os
import shutil
import sys
from typing import Any


def terminal_facts() -> dict[str, Any]:
    """Plain data for `doctor`."""
    size = shutil.get_terminal_size()
    return {
        "term": os.environ.get("TERM") or "not set",
        "colours": _colours(),
        "text_encoding": locale.getpreferredencoding(False),
        "size": f"{size.columns}x{size.lines}" + ("" if size.columns >= 60 and size.lines >= 20 else " (small: only the chat is shown)"),
        "interactive": sys.stdin.isatty() and sys.stdout.isatty(),
        "over_ssh": "SSH_TTY" in os.environ,
        "multiplexer": "tmux" if "TMUX" in os.environ else "screen" if "STY" in os.environ else "none",
    }


def why_no_screen() -> str:
    """Why no screen can be drawn here, as a clause; "" when it can."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "standard input or output is none"
    if (term := os.environ.get("TERM", "")).lower() in ("dumb", "unknown"):
        return f"TERM={term} says that this one only prints lines (if it does more, set TERM=xterm-256color)"
    return ""


def _colours() -> int:
    """0 where NO_COLOR asks for none."""
    if os.environ.get("NO_COLOR"):
        return 0
    if os.environ.get("COLORTERM", "") in ("truecolor", "24bit"):
        return 1 << 24
    return 256 if "256" in os.environ.get("TERM", "") else 16

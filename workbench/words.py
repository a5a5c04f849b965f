"""What the words of a command line name: adapters that are there, a question."""
from __future__ import annotations

import sys

from .arguments import AdapterArgument, UsageError, find_adapter, parse_adapter


def adapters_of(texts: tuple[str, ...], option: str = "--lora") -> tuple[AdapterArgument, ...]:
    """The adapters of one mix, each once. Raises UsageError."""
    adapters = tuple(find_adapter(parse_adapter(text, option), f"{option} ") for text in texts)
    names = [adapter.name for adapter in adapters if adapter.name]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{option}: two adapters are called {doubled}; give one another name: NAME=PATH")
    return adapters


def question(words: str | None) -> str:
    """The text of -p, or standard input. Raises UsageError when there is none."""
    if words in (None, "-") and not (words is None and sys.stdin.isatty()):
        try:
            words = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not text in {error.encoding}: {error.reason} at byte {error.start}") from error
    if not (words or "").strip():
        raise UsageError('there is nothing to ask: give -p "...", or pipe the question into standard input')
    return words

"""Where two texts differ, word by word."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

_WORD = re.compile(r"\n|\S+")
MOST_PAIRS = 150_000
"""of equal words, one of each text: what difflib looks at, several times over. Beyond it the middle counts as one change"""


class Change(NamedTuple):
    """Characters [start, end) of either text stand for each other; where one has none, start is end."""

    first_start: int
    first_end: int
    second_start: int
    second_end: int


def word_changes(first: str, second: str) -> tuple[Change, ...]:
    """The places where the words of two texts differ, in order. Blanks do not count, newlines are words."""
    a, b = ([(match[0], match.start(), match.end()) for match in _WORD.finditer(text)] for text in (first, second))
    words_a, words_b = [word for word, _, _ in a], [word for word, _, _ in b]
    start = _shared(words_a, words_b)
    end = _shared(words_a[start:][::-1], words_b[start:][::-1])
    middle_a, middle_b = words_a[start:len(a) - end], words_b[start:len(b) - end]
    return tuple(
        Change(*_span(a, start + i, start + j, len(first)), *_span(b, start + k, start + m, len(second)))
        for i, j, k, m in _differences(middle_a, middle_b))


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    """Equal words at the beginning of both."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def _differences(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int, int, int]]:
    if not first and not second:
        return []
    counts = Counter(second)
    if sum(counts[word] for word in first) > MOST_PAIRS:
        return [(0, len(first), 0, len(second))]
    found = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    return [(i, j, k, m) for kind, i, j, k, m in found if kind != "equal"]


def _span(words: Sequence[tuple[str, int, int]], start: int, end: int, size: int) -> tuple[int, int]:
    """Characters of words [start, end); for none of them the place where they would stand."""
    if start < end:
        return words[start][1], words[end - 1][2]
    place = words[start][1] if start < len(words) else size
    return place, place

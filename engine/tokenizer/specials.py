"""Special tokens as they are spelled in text."""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping


class SpecialTokens:
    """Finds tokens by their spelling, the longest at each place; the time does not grow with their number."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids`: text -> id. Empty texts are never found."""
        self.ids = {text: number for text, number in ids.items() if text}
        sizes = defaultdict(set)
        for text in self.ids:
            sizes[text[0]].add(len(text))
        self._sizes = {first: sorted(lengths, reverse=True) for first, lengths in sizes.items()}
        self._firsts = re.compile("[" + "".join(map(re.escape, self._sizes)) + "]") if self._sizes else None

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of every special token spelled in `text`, from left to right, none over another."""
        start = 0
        while self._firsts and (first := self._firsts.search(text, start)):
            start = first.start()
            for size in self._sizes[first[0]]:
                number = self.ids.get(text[start:start + size])
                if number is not None:
                    yield start, start + size, number
                    start += size
                    break
            else:
                start += 1

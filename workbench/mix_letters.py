"""A letter for each mix that KV memory holds."""
from __future__ import annotations

from string import ascii_uppercase

from ..engine.protocol import Mix

OTHERS = "*"
"""the letter of mixes beyond the alphabet"""


class MixLetters:
    """Which letter stands for which mix. The base is always A; the others keep theirs as long as they are in memory."""

    def __init__(self) -> None:
        self._of: dict[Mix, str] = {(): ascii_uppercase[0]}

    def __getitem__(self, mix: Mix) -> str:
        return self._of.get(mix, OTHERS)

    def follow(self, mixes: tuple[Mix, ...]) -> None:
        """Give letters to these, and take them from all others."""
        kept = {(): ascii_uppercase[0]} | {mix: self._of[mix] for mix in mixes if mix in self._of}
        free = (letter for letter in ascii_uppercase if letter not in kept.values())
        for mix in mixes:
            if mix not in kept and (letter := next(free, "")):
                kept[mix] = letter
        self._of = kept

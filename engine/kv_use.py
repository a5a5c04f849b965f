"""What one user of the KV memory has."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .blocks import BLOCK_TOKENS, BlockTable
from .kv_keys import NO_TOKENS, Timeline, packed
from .protocol.kv import CacheUse
from .stretches import Stretch


@dataclass(slots=True)
class Use:
    """The first `stored` of `ids` have keys and values in the blocks of `table`, computed under `stretches`."""

    ids: Sequence[int]
    stretches: tuple[Stretch, ...]
    timeline: Timeline
    root: bytes
    table: BlockTable = field(default_factory=BlockTable)
    keys: list[bytes] = field(default_factory=list)
    """token keys of the whole blocks among the stored tokens"""
    stored: int = 0
    found: CacheUse | None = None
    """what it found when it began, until it computes something"""

    @property
    def parent(self) -> bytes:
        """The token key before the block that is computed now."""
        return self.keys[-1] if self.keys else NO_TOKENS

    @property
    def start(self) -> int:
        """The first token of the block that is computed now."""
        return len(self.keys) * BLOCK_TOKENS

    @property
    def limit(self) -> int:
        """Tokens that may be found: a last one must be computed to go on from."""
        return len(self.ids) - 1

    def packed(self, end: int) -> bytes:
        """The ids from `start` up to `end`."""
        return packed(self.ids[self.start : max(end, 0)])

    def set(self, ids: Sequence[int], stretches: Sequence[Stretch]) -> None:
        """What is known now. Raises ValueError when other adapters are said to act on stored tokens than those computed with."""
        self.ids, stretches = ids, tuple(stretches)
        if stretches is not self.stretches and stretches != self.stretches:
            timeline = Timeline(stretches, self.root)
            if timeline.at(self.stored).key != self.timeline.at(self.stored).key:
                raise ValueError(f"other adapters act on the {self.stored} stored tokens of a request than they were computed with")
            self.timeline = timeline
        self.stretches = stretches

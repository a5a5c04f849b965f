"""KV memory in blocks of 16 tokens, reserved whole when a request is admitted."""
from __future__ import annotations

import bisect
from dataclasses import dataclass

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one request, in the order of its tokens."""

    blocks: tuple[int, ...]

    @property
    def first(self) -> int:
        """The first block when they are one consecutive run, else -1."""
        run = self.blocks[-1] - self.blocks[0] + 1 == len(self.blocks)
        return self.blocks[0] if run else -1

    def cell(self, position: int) -> int:
        """Where the token at `position` lies in the flattened cache."""
        return self.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


class BlockPool:
    """Which blocks are free. A reservation is one consecutive run where there is one, so that attention reads a view."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks
        self._runs: list[tuple[int, int]] = [(0, blocks)] if blocks else []
        """free runs (start, length), ascending, never adjacent"""

    def reserve(self, count: int) -> BlockTable | None:
        """`count` >= 1 blocks, or None when fewer are free (nothing changes then)."""
        if count > self.free:
            return None
        self.free -= count
        fitting = [run for run in self._runs if run[1] >= count]
        if fitting:
            return BlockTable(tuple(self._take(min(fitting, key=lambda run: run[1]), count)))
        taken: list[int] = []
        while len(taken) < count:
            run = max(self._runs, key=lambda run: run[1])
            taken += self._take(run, min(run[1], count - len(taken)))
        return BlockTable(tuple(sorted(taken)))

    def release(self, table: BlockTable) -> None:
        """Give the blocks back. Raises ValueError for a block that is free already."""
        for block in table.blocks:
            self._give(block)
        self.free += len(table.blocks)

    def _take(self, run: tuple[int, int], count: int) -> range:
        at = self._runs.index(run)
        start, length = run
        self._runs[at : at + 1] = [(start + count, length - count)] if length > count else []
        return range(start, start + count)

    def _give(self, block: int) -> None:
        at = bisect.bisect_right(self._runs, (block, self.blocks + 1))
        start, end, first, last = block, block + 1, at, at
        if at and sum(self._runs[at - 1]) > block:
            raise ValueError(f"block {block} is free already")
        if at and sum(self._runs[at - 1]) == block:
            start, first = self._runs[at - 1][0], at - 1
        if at < len(self._runs) and self._runs[at][0] == end:
            end, last = sum(self._runs[at]), at + 1
        self._runs[first:last] = [(start, end - start)]

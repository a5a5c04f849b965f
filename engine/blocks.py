"""KV memory in blocks of 16 tokens: which block is whose, and where the tokens of a request lie.

Why 16: what a request shares or loses is whole blocks, so a block should be no longer than a turn's short remainder (an aLoRA's invocation,
a template's header). What is known of a block, 0.8 kB, is still a thousandth of its keys and values then (737 kB of the default model), and
attention reads runs of consecutive blocks, so short ones do not make it slower.
"""
from __future__ import annotations

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class BlockTable:
    """The blocks of one request, in the order of its tokens. It changes by `append`, `replace` and `cut` only.

    `moves` grows whenever a block is taken out: a copy of the table is then to be made anew, not only longer.
    """

    __slots__ = ("blocks", "moves", "_starts")

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self.blocks: list[int] = []
        self.moves = 0
        self._starts: list[int] = []
        """indexes in `blocks` at which a consecutive run begins"""
        for block in blocks:
            self.append(block)

    def append(self, block: int) -> None:
        if not self.blocks or self.blocks[-1] + 1 != block:
            self._starts.append(len(self.blocks))
        self.blocks.append(block)

    def replace(self, index: int, block: int) -> None:
        rest = self.blocks[index + 1 :]
        self.cut(index)
        for each in (block, *rest):
            self.append(each)

    def cut(self, count: int) -> list[int]:
        """Keep the first `count` blocks. Returns the others."""
        rest = self.blocks[count:]
        self.moves += 1
        del self.blocks[count:], self._starts[bisect.bisect_left(self._starts, count) :]
        return rest

    def cell(self, position: int) -> int:
        """Where the token at `position` lies in the flattened cache."""
        return self.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS

    def cells(self, position: int, end: int) -> np.ndarray:
        """[end - position] `cell` of the tokens from `position` up to `end`."""
        first = position // BLOCK_TOKENS
        blocks = np.array(self.blocks[first : blocks_for(end)])[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        return blocks.ravel()[position - first * BLOCK_TOKENS : end - first * BLOCK_TOKENS]

    def runs(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The blocks of the first `tokens` tokens as (first block, count) of consecutive runs, in the order of the tokens."""
        end = blocks_for(tokens)
        starts = self._starts[: bisect.bisect_left(self._starts, end)]
        return tuple((self.blocks[start], stop - start) for start, stop in zip(starts, [*starts[1:], end], strict=True))


class BlockPool:
    """Every block is held by users (counted), or kept: held by nobody, but what it has can be found; or unused."""

    def __init__(self, blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.blocks = blocks
        self.unused = blocks
        self._clock = clock
        self._holders = [0] * blocks
        self._kept: OrderedDict[int, float] = OrderedDict()
        """block -> when it was last held, the oldest first"""
        self._runs: list[tuple[int, int]] = [(0, blocks)] if blocks else []
        """unused runs (start, length), ascending, never adjacent"""

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.unused + len(self._kept)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def take(self, count: int, after: int = -1) -> list[int]:
        """`count` unused blocks, held once each; the first ones follow the block `after` where those are unused.

        Else they come from the longest run, and not from right behind a held block if there is more room than that: what holds it
        grows into it. Raises ValueError when fewer are unused (nothing changes then).
        """
        if count > self.unused:
            raise ValueError(f"{count} blocks are wanted, {self.unused} are unused")
        taken: list[int] = []
        while len(taken) < count:
            taken += self._take_run(count - len(taken), taken[-1] if taken else after)
        return taken

    def take_aside(self) -> int:
        """An unused block where it is least in the way of what grows: the end of the shortest run. Raises ValueError without one."""
        if not self._runs:
            raise ValueError("no block is unused")
        start, length = min(self._runs, key=lambda run: run[1])
        self._hold_run(start + length - 1, 1)
        return start + length - 1

    def hold(self, block: int) -> None:
        """One more holder of a block that is held or kept."""
        if not self._holders[block] and self._kept.pop(block, None) is None:
            raise ValueError(f"block {block} is unused")
        self._holders[block] += 1

    def drop(self, block: int, keep: bool) -> None:
        """One holder less. With `keep` what the last one leaves stays, as the latest used."""
        if not self._holders[block]:
            raise ValueError(f"block {block} is not held")
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if keep:
            self._kept[block] = self._clock()
        else:
            self._give(block)

    def forget(self, block: int) -> float:
        """A kept block is unused from here on. Returns when it was last held."""
        since = self._kept.pop(block)
        self._give(block)
        return since

    def oldest(self, count: int) -> list[int]:
        """The `count` kept blocks that were held the longest time ago, or all, the oldest first."""
        return list(islice(self._kept, count))

    def all_kept(self) -> list[int]:
        return list(self._kept)

    def _take_run(self, count: int, after: int) -> range:
        at = bisect.bisect_left(self._runs, (after + 1, 0))
        if after >= 0 and at < len(self._runs) and self._runs[at][0] == after + 1:
            start, length = self._runs[at]
        else:
            start, length = max(self._runs, key=lambda run: run[1])
            if start and self._holders[start - 1] and length > count:
                start += (length - count + 1) // 2
                length = count
        return self._hold_run(start, min(length, count))

    def _hold_run(self, start: int, count: int) -> range:
        at = bisect.bisect_right(self._runs, (start, self.blocks + 1)) - 1
        first, length = self._runs[at]
        end = first + length
        left = [(first, start - first)] if start > first else []
        right = [(start + count, end - start - count)] if start + count < end else []
        self._runs[at : at + 1] = left + right
        self.unused -= count
        for block in range(start, start + count):
            self._holders[block] = 1
        return range(start, start + count)

    def _give(self, block: int) -> None:
        at = bisect.bisect_right(self._runs, (block, self.blocks + 1))
        start, end, first, last = block, block + 1, at, at
        if at and sum(self._runs[at - 1]) == block:
            start, first = self._runs[at - 1][0], at - 1
        if at < len(self._runs) and self._runs[at][0] == end:
            end, last = sum(self._runs[at]), at + 1
        self._runs[first:last] = [(start, end - start)]
        self.unused += 1

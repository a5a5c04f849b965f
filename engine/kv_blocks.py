"""KV blocks with what they hold: given, copied, kept and forgotten, and why."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from .blocks import BLOCK_TOKENS, BlockPool, BlockTable
from .kv_index import Filled, Gone, KvIndex
from .kv_keys import ID_BYTES, History
from .protocol.events import Emit
from .protocol.kv import CacheCleared, KvEvicted
from .protocol.words import requests_text

EVICT_AHEAD = 8
"""blocks that are evicted at once, of a large memory: what grows then gets consecutive ones, which attention reads as one"""
EVICT_SHARE = 64
"""but never more ahead than one of so many"""


class KvBlocks:
    """The pool and the index of what can be found in it, in agreement: a block is kept when nobody holds it and it can be found.

    `copy(source, target, cells)` copies the keys and values of the first `cells` cells of a block, all layers.
    """

    def __init__(self, blocks: int, copy: Callable[[int, int, int], None], emit: Emit, clock: Callable[[], float]) -> None:
        self.pool, self.index, self.counts = BlockPool(blocks, clock), KvIndex(), Counter[str]()
        self._copy, self._emit, self._clock = copy, emit, clock

    def grow(self, table: BlockTable, count: int, user: int) -> bool:
        """`count` more blocks for `table`, evicting for them. False, and nothing changes, when fewer are free."""
        if not self._make_room(count, user):
            return False
        for block in self.pool.take(count, table.blocks[-1] if table.blocks else -1):
            table.append(block)
        return True

    def copy_beginning(self, source: Filled, cells: int, table: BlockTable, at: int, user: int) -> bool:
        """Copy the first `cells` cells of `source` into the block `at` of `table`, a new one if it has none. False: none is free.

        Where `source` lies right behind the table and nobody else holds it, the table takes its block and the content moves to another
        one: a chat that goes on stays one run.
        """
        block = source.block
        self.pool.hold(block)
        if at < len(table.blocks):
            self._copy(block, table.blocks[at], cells)
        elif not self._make_room(1, user):
            self.pool.drop(block, keep=True)
            return False
        elif table.blocks and table.blocks[-1] + 1 == block and self.pool.holders(block) == 1 and source.tokens < BLOCK_TOKENS:
            aside = self.pool.take_aside()
            self._copy(block, aside, source.tokens)
            self.index.move(source, aside)
            table.append(block)
            block = aside
        else:
            table.append(self.pool.take(1, table.blocks[-1] if table.blocks else -1)[0])
            self._copy(block, table.blocks[at], cells)
        self.pool.drop(block, keep=True)
        return True

    def make_writable(self, table: BlockTable, at: int, cells: int, user: int) -> bool:
        """Make the block `at` of `table`, of which `cells` cells stay, one that can be written. False when it cannot be."""
        block = table.blocks[at]
        filled = self.index.of(block)
        if filled is None and self.pool.holders(block) == 1:
            return True
        if self._make_room(1, user):
            table.replace(at, self.pool.take(1, table.blocks[at - 1] if at else -1)[0])
            self._copy(block, table.blocks[at], cells)
            self.drop([block])
            return True
        if self.pool.holders(block) > 1:
            return False
        self.index.remove(block, Gone("evicted", self._clock(), f" for {requests_text([user])}"))
        return True

    def put(self, table: BlockTable, at: int, found: Sequence[int]) -> None:
        """The findable blocks `found` are those of `table` from `at` on; what it had there was nobody else's and is given back."""
        for block in found:
            self.pool.hold(block)
        had = table.cut(at)
        self.drop(had[: len(found)])
        for block in (*found, *had[len(found) :]):
            table.append(block)

    def add(self, block: int, parent: bytes, ids: bytes, before: int, history: History, user: int, key: bytes) -> None:
        """`block`, which holds `ids` after `before` tokens, can be found, unless another one begins with the same. Those that are the
        beginning of it are forgotten: nothing is lost with them."""
        wanted, outgrown = len(ids) // ID_BYTES, []
        for other in self.index.alike(parent, ids):
            if other.gone is not None:
                continue
            same = other.agrees(ids, before, history)
            if same == wanted:
                return
            if same == other.tokens:
                outgrown.append(other.block)
        for old in outgrown:
            self.index.remove(old, None)
            self.pool.forget(old)
        self.index.add(block, parent, ids, history, user, key)

    def drop(self, blocks: Sequence[int], forget_of: int | None = None) -> None:
        """One holder less for each; the last ones are the oldest then, so that a beginning outlives what follows it.

        What the user `forget_of` computed can be found no more when nobody holds it.
        """
        for block in reversed(blocks):
            filled = self.index.of(block)
            if filled is not None and filled.user == forget_of and self.pool.holders(block) == 1:
                self.index.remove(block, None)
                filled = None
            self.pool.drop(block, keep=filled is not None)

    def clear(self, because: str, digests: Collection[str] | None = None) -> int:
        """Forget what nobody holds; with `digests` only what was computed with one of these adapters. Returns how many blocks.

        `because` goes on the sentence "cleared 3 s ago: ...".
        """
        gone, known, count = Gone("cleared", self._clock(), f": {because}"), {}, 0
        for block in self.pool.all_kept():
            filled = self.index.of(block)
            if filled is None:
                raise AssertionError(f"block {block} is kept and cannot be found")
            if digests is not None:
                history = filled.history
                if history.key not in known:
                    known[history.key] = any(each.digest in digests for step in history.steps() for each in step.acting)
                if not known[history.key]:
                    continue
            self.index.remove(block, gone)
            self.pool.forget(block)
            count += 1
        self.counts["cleared_blocks"] += count
        if count or digests is None:
            self._emit(CacheCleared(count, because))
        return count

    def _make_room(self, count: int, user: int) -> bool:
        """At least `count` unused blocks. False, and nothing changes, when fewer are free."""
        lack = count - self.pool.unused
        if lack <= 0:
            return True
        if lack > self.pool.kept:
            return False
        gone = Gone("evicted", self._clock(), f" for {requests_text([user])}")
        victims = self.pool.oldest(max(lack, min(EVICT_AHEAD, self.pool.blocks // EVICT_SHARE)))
        since = []
        for block in victims:
            self.index.remove(block, gone)
            since.append(self.pool.forget(block))
        self.counts["evicted_blocks"] += len(victims)
        self._emit(KvEvicted(len(victims), user, gone.when - since[0]))
        return True

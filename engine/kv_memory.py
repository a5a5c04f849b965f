"""The KV memory: whose blocks are whose, what they hold, and what a request finds in them. No torch."""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from .blocks import BLOCK_TOKENS, BlockPool, BlockTable, blocks_for
from .kv_index import Filled, Gone, KvIndex
from .kv_keys import NO_TOKENS, Timeline, packed, token_key
from .kv_map import Tenant, kv_view
from .kv_others import OneSlot, named_alike
from .kv_reasons import Missed, reason
from .protocol.events import Emit
from .protocol.kv import CacheCleared, CacheUse, KvCounters, KvEvicted, KvView
from .protocol.words import Mix, requests_text
from .stretches import Stretch

EVICT_AHEAD = 8
"""blocks that are evicted at once, of a large memory: what grows then gets consecutive ones, which attention reads as one"""
EVICT_SHARE = 64
"""but never more ahead than one of so many"""


@dataclass(slots=True)
class _Use:
    """What one user has. `keys`: token keys of the whole blocks among the first `stored` tokens."""

    ids: Sequence[int]
    stretches: tuple[Stretch, ...]
    timeline: Timeline
    root: bytes
    table: BlockTable = field(default_factory=BlockTable)
    keys: list[bytes] = field(default_factory=list)
    stored: int = 0

    @property
    def parent(self) -> bytes:
        return self.keys[-1] if self.keys else NO_TOKENS


class KvMemory:
    """Blocks, held by users (requests), and what can be found in them.

    A block is findable once all its tokens are computed, and the last one of a request once that ends; it is not written again while
    it is findable or others hold it. Found is what was computed from the same tokens under the same adapters at the same scales, token by
    token (kv_keys.py), nothing else.
    """

    def __init__(self, blocks: int, copy: Callable[[int, int, int], None], emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        """`copy(source, target, cells)` copies the keys and values of the first `cells` cells of a block, all layers."""
        self._pool, self._index, self._others = BlockPool(blocks, clock), KvIndex(), OneSlot()
        self._copy, self._emit, self._clock = copy, emit, clock
        self._users: dict[int, _Use] = {}
        self._counts: Counter[str] = Counter()

    @property
    def blocks(self) -> int:
        return self._pool.blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds; those that are only kept to be found count as free."""
        return self._pool.free

    def begin(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch], root: bytes = b"") -> CacheUse:
        """Open the table of `user` with what is found of `ids`, at most all but the last: a token must be computed to go on from.

        `root`: whatever else the numbers depend on (longrope's factors). The `acting` of a stretch counts in its order. Raises ValueError
        when `user` has a table already.
        """
        if user in self._users:
            raise ValueError(f"request {user} has its KV blocks already")
        stretches = tuple(stretches)
        use = self._users[user] = _Use(ids, stretches, Timeline(stretches, root), root)
        copied, no_room = self._match(user, use)
        found = self._described(use, copied, no_room)
        self._others.take(user, ids, use.timeline)
        self._counts.update(looked_up_tokens=max(len(ids) - 1, 0), hit_tokens=use.stored, copied_tokens=copied,
                            llama_cpp_tokens=found.llama_cpp_tokens, name_keyed_wrong=found.name_keyed_wrong)
        return found

    def table_of(self, user: int) -> BlockTable:
        return self._users[user].table

    def stored(self, user: int) -> int:
        """Tokens of `user` whose keys and values are in its blocks."""
        return self._users[user].stored

    def extend(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch]) -> int:
        """Look again from the stored tokens on: others may have computed what follows meanwhile. Returns the tokens gained."""
        use = self._current(user, ids, stretches)
        before = use.stored
        copied, _ = self._match(user, use)
        self._counts.update(hit_tokens=use.stored - before, copied_tokens=copied)
        return use.stored - before

    def next_key(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch]) -> bytes | None:
        """The key of the next block that `user` will have computed wholly; None when not all its tokens are known."""
        use = self._current(user, ids, stretches)
        start = len(use.keys) * BLOCK_TOKENS
        end = start + BLOCK_TOKENS
        if end > len(ids):
            return None
        return token_key(use.parent, packed(ids[start:end])) + use.timeline.at(end).key

    def reserve(self, user: int, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens of `user`; the kept ones that were held the longest time ago are given away for them.

        False, and nothing changes, when too few are free.
        """
        table = self._users[user].table
        need = blocks_for(tokens) - len(table.blocks)
        if need <= 0:
            return True
        if not self._make_room(need, user):
            return False
        for block in self._pool.take(need, table.blocks[-1] if table.blocks else -1):
            table.append(block)
        return True

    def commit(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch], stored: int) -> None:
        """The first `stored` tokens are computed now, under `stretches`. Whole blocks become findable, the first of equal ones.

        Raises ValueError when there are no blocks for so many.
        """
        use = self._current(user, ids, stretches)
        if blocks_for(stored) > len(use.table.blocks) or stored < use.stored:
            raise ValueError(f"request {user} has {use.stored} tokens in {len(use.table.blocks)} KV blocks; {stored} were committed")
        for at in range(len(use.keys), stored // BLOCK_TOKENS):
            block_ids = packed(ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
            parent, history = use.parent, use.timeline.at((at + 1) * BLOCK_TOKENS)
            use.keys.append(token_key(parent, block_ids))
            self._index.add(use.table.blocks[at], parent, block_ids, history, user, use.keys[-1])
        use.stored = stored
        if self._others.user == user:
            self._others.take(user, ids, use.timeline)

    def rewind(self, user: int, stored: int) -> None:
        """Forget what comes after the first `stored` tokens, so that it is computed again; blocks behind them are given back.

        A block within which they end is copied first if it can be found or others hold it. Where no block is free for that, it is
        written over if only `user` holds it (and found no more), else left out: `stored` of the user is less then.
        """
        use = self._users[user]
        if stored > use.stored:
            raise ValueError(f"request {user} has {use.stored} tokens stored and cannot go back to {stored}")
        whole, part = divmod(stored, BLOCK_TOKENS)
        self._drop(use.table.cut(blocks_for(stored)))
        del use.keys[whole:]
        use.stored = stored
        if part and not self._own(user, use.table, whole, part):
            self._drop(use.table.cut(whole))
            use.stored = whole * BLOCK_TOKENS

    def end(self, user: int, keep: bool = True) -> None:
        """Close the table of `user`. What can be found stays so, its partial last block too.

        Without `keep` what it computed is forgotten, as far as nobody else holds it.
        """
        use = self._users.pop(user)
        whole, part = divmod(use.stored, BLOCK_TOKENS)
        if part and keep:
            ids = packed(use.ids[whole * BLOCK_TOKENS : use.stored])
            self._index.add(use.table.blocks[whole], use.parent, ids, use.timeline.at(use.stored), user)
        if not keep:
            for block in use.table.blocks:
                filled = self._index.of(block)
                if filled is not None and filled.user == user and self._pool.holders(block) == 1:
                    self._index.remove(block, None)
        self._drop(use.table.blocks)

    def clear(self, because: str, digests: Collection[str] | None = None) -> int:
        """Forget what nobody holds; with `digests` only what was computed with one of these adapters. Returns how many blocks.

        `because` goes on the sentence "cleared 3 s ago: ...".
        """
        gone, known, count = Gone("cleared", self._clock(), f": {because}"), {}, 0
        for block in self._pool.all_kept():
            filled = self._index.of(block)
            if filled is None:
                raise AssertionError(f"block {block} is kept and cannot be found")
            if digests is not None:
                history = filled.history
                if history.key not in known:
                    known[history.key] = any(each.digest in digests for step in history.steps() for each in step.acting)
                if not known[history.key]:
                    continue
            self._index.remove(block, gone)
            self._pool.forget(block)
            count += 1
        self._counts["cleared_blocks"] += count
        if count or digests is None:
            self._emit(CacheCleared(count, because))
        return count

    def count_preemption(self) -> None:
        """A request had to give its blocks back before it ended."""
        self._counts["preemptions"] += 1

    def view(self, running: Iterable[tuple[int, Mix]], nbytes: int = 0) -> KvView:
        """All of it for a panel; `running`: the requests to name as owners, with their mixes; `nbytes`: of the whole memory."""
        tenants = {user: Tenant(use.table, use.stored, use.timeline) for user, use in self._users.items()}
        view = kv_view(self._pool, self._index, tenants, running)
        return msgspec.structs.replace(view, bytes=nbytes, counters=KvCounters(**self._counts))

    def _current(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch]) -> _Use:
        """The user's record with what is known now. Raises ValueError when what acted on stored tokens is said to be another."""
        use = self._users[user]
        use.ids, stretches = ids, tuple(stretches)
        if stretches is not use.stretches and stretches != use.stretches:
            timeline = Timeline(stretches, use.root)
            if timeline.at(use.stored).key != use.timeline.at(use.stored).key:
                raise ValueError(f"other adapters act on the {use.stored} stored tokens of request {user} than they were computed with")
            use.timeline = timeline
        use.stretches = stretches
        return use

    def _match(self, user: int, use: _Use) -> tuple[int, bool]:
        """Hold what is found of the user's tokens from the stored ones on. Returns (tokens copied, whether a copy lacked a block)."""
        limit, ids = len(use.ids) - 1, use.ids
        at = len(use.keys)
        while (at + 1) * BLOCK_TOKENS <= limit:
            key = token_key(use.parent, packed(ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]))
            filled = self._index.find(key, use.timeline.at((at + 1) * BLOCK_TOKENS))
            if filled is None:
                break
            self._pool.hold(filled.block)
            if at < len(use.table.blocks):
                self._drop([use.table.blocks[at]])
                use.table.replace(at, filled.block)
            else:
                use.table.append(filled.block)
            use.keys.append(key)
            at += 1
        use.stored = max(use.stored, at * BLOCK_TOKENS)
        return self._copy_beginning(user, use, limit)

    def _copy_beginning(self, user: int, use: _Use, limit: int) -> tuple[int, bool]:
        """Copy the beginning of a block that goes on as the user's tokens do, if there is one.

        Even one token pays: it costs a pass through the layers, its copy moves their keys and values.
        """
        start = len(use.keys) * BLOCK_TOKENS
        had, ids = use.stored - start, packed(use.ids[start : min(start + BLOCK_TOKENS, limit)])
        history, best, source = use.timeline.at(start + BLOCK_TOKENS), had, None
        if not ids:
            return 0, False
        for filled in self._index.alike(use.parent, ids):
            count = 0 if filled.gone else filled.agrees(ids, start, history)
            if count > best:
                best, source = count, filled
        if source is None:
            return 0, False
        if not self._copy_block(user, use.table, source, start // BLOCK_TOKENS, best):
            return 0, True
        use.stored = start + best
        return best - had, False

    def _copy_block(self, user: int, table: BlockTable, source: Filled, at: int, cells: int) -> bool:
        """Copy the first `cells` cells of `source` into the block `at` of `table`, a new one if it has none. False: none is free."""
        block = source.block
        self._pool.hold(block)
        if at < len(table.blocks):
            self._copy(block, table.blocks[at], cells)
        elif not self._make_room(1, user):
            self._pool.drop(block, keep=True)
            return False
        elif table.blocks and table.blocks[-1] + 1 == block and self._pool.holders(block) == 1 and source.tokens < BLOCK_TOKENS:
            aside = self._pool.take_aside()
            self._copy(block, aside, source.tokens)
            self._index.move(source, aside)
            table.append(block)
            block = aside
        else:
            table.append(self._pool.take(1, table.blocks[-1] if table.blocks else -1)[0])
            self._copy(block, table.blocks[at], cells)
        self._pool.drop(block, keep=True)
        return True

    def _own(self, user: int, table: BlockTable, at: int, cells: int) -> bool:
        """Make the block `at` of `table`, of which `cells` cells stay, one that can be written. False when it cannot be."""
        block = table.blocks[at]
        filled = self._index.of(block)
        if filled is None and self._pool.holders(block) == 1:
            return True
        if self._make_room(1, user):
            table.replace(at, self._pool.take(1, table.blocks[at - 1] if at else -1)[0])
            self._copy(block, table.blocks[at], cells)
            self._drop([block])
            return True
        if self._pool.holders(block) > 1:
            return False
        self._index.remove(block, Gone("evicted", self._clock(), f" for {requests_text([user])}"))
        return True

    def _make_room(self, count: int, user: int) -> bool:
        """At least `count` unused blocks. False, and nothing changes, when fewer are free."""
        lack = count - self._pool.unused
        if lack <= 0:
            return True
        if lack > self._pool.kept:
            return False
        gone = Gone("evicted", self._clock(), f" for {requests_text([user])}")
        victims = self._pool.oldest(max(lack, min(EVICT_AHEAD, self._pool.blocks // EVICT_SHARE)))
        since = []
        for block in victims:
            self._index.remove(block, gone)
            since.append(self._pool.forget(block))
        self._counts["evicted_blocks"] += len(victims)
        self._emit(KvEvicted(len(victims), user, gone.when - since[0]))
        return True

    def _drop(self, blocks: Sequence[int]) -> None:
        """One holder less for each; the last ones are the oldest then, so that a beginning outlives what follows it."""
        for block in reversed(blocks):
            self._pool.drop(block, keep=self._index.of(block) is not None)

    def _described(self, use: _Use, copied: int, no_room: bool) -> CacheUse:
        """What was found by a request that has just begun, and beside it what others would have had."""
        start, limit = len(use.keys) * BLOCK_TOKENS, len(use.ids) - 1
        kind, detail = "", ""
        if use.stored < limit:
            end = start + BLOCK_TOKENS if start + BLOCK_TOKENS <= len(use.ids) else limit
            ids = packed(use.ids[start:end])
            missed = Missed(ids, start, use.stored - start, use.timeline)
            kind, detail = reason(missed, self._index.alike(use.parent, ids), self._clock())
        return CacheUse(
            prompt_tokens=len(use.ids), hit_tokens=use.stored, hit_blocks=len(use.keys), copied_tokens=copied, miss=kind, detail=detail,
            base_tokens=use.timeline.base_tokens(use.stored), llama_cpp_tokens=self._others.found(use.ids, use.timeline),
            name_keyed_wrong=self._named_wrong(use, limit))

    def _named_wrong(self, use: _Use, limit: int) -> int:
        """Tokens beyond those found that a cache which knows adapters by name would have reused, though computed otherwise."""
        at, parent, wrong = len(use.keys), use.parent, 0
        while (at + 1) * BLOCK_TOKENS <= limit:
            ids = packed(use.ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
            key = token_key(parent, ids)
            other = named_alike(self._index.alike(parent, ids), key, use.timeline.at((at + 1) * BLOCK_TOKENS))
            if other is None:
                break
            wrong += BLOCK_TOKENS if other else 0
            parent, at = key, at + 1
        return wrong

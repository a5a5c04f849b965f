"""The KV memory: whose blocks are whose, what they hold, and what a request finds in them. No torch."""
from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from .blocks import BLOCK_TOKENS, BlockTable, blocks_for
from .kv_blocks import KvBlocks
from .kv_keys import BLOCK_BYTES, ID_BYTES, Timeline, token_key
from .kv_map import kv_view
from .kv_missed import missed_blocks, missed_runs
from .kv_others import OneSlot, named_wrong
from .kv_use import Use
from .protocol.events import Emit
from .protocol.kv import CacheUse, KvCounters, KvView
from .protocol.words import Mix
from .stretches import Stretch


class KvMemory:
    """Blocks, held by users (requests), and what can be found in them.

    A block is findable once all its tokens are computed, and the last one of a request once that ends; it is not written again while
    it is findable or others hold it. Found is what was computed from the same tokens under the same adapters at the same scales, token by
    token (kv_keys.py), nothing else.
    """

    def __init__(self, blocks: int, copy: Callable[[int, int, int], None], emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        """`copy(source, target, cells)` copies the keys and values of the first `cells` cells of a block, all layers."""
        self._blocks, self._others, self._clock = KvBlocks(blocks, copy, emit, clock), OneSlot(), clock
        self._users: dict[int, Use] = {}

    @property
    def blocks(self) -> int:
        return self._blocks.pool.blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds; those that are only kept to be found count as free."""
        return self._blocks.pool.free

    def begin(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch], root: bytes = b"") -> CacheUse:
        """Open the table of `user` with what is found of `ids`, at most all but the last: a token must be computed to go on from.

        `root`: whatever else the numbers depend on (longrope's factors). The `acting` of a stretch counts in its order. Raises ValueError
        when `user` has a table already.

        What ends before its first `commit` is taken out of the counters again: a request that cannot go on yet does not count each time
        that it tries. Users with negative numbers, who are no person's requests, do not count.
        """
        if user in self._users:
            raise ValueError(f"request {user} has its KV blocks already")
        stretches = tuple(stretches)
        use = self._users[user] = Use(ids, stretches, Timeline(stretches, root), root)
        had, cleared = self._others.begin(user, use, self._blocks.index) if user >= 0 else (0, 0)
        self._match(use)
        wrong = named_wrong(use, self._blocks.index)
        copied, lacking = self._copy_beginning(user, use)
        found = use.found = CacheUse(
            prompt_tokens=len(ids), hit_tokens=use.stored, hit_blocks=len(use.keys), copied_tokens=copied,
            missed_blocks=missed_blocks(use), missed=missed_runs(use, self._blocks.index, self._clock(), lacking),
            base_tokens=use.timeline.base_tokens(use.stored), llama_cpp_tokens=had, llama_cpp_cleared=cleared, name_keyed_wrong=wrong)
        self._count(user, found, 1)
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
        self._match(use)
        copied, _ = self._copy_beginning(user, use)
        gained = CacheUse(1, hit_tokens=use.stored - before, copied_tokens=copied)
        self._count(user, gained, 1)
        if use.found is not None:
            use.found = msgspec.structs.replace(
                use.found, hit_tokens=use.found.hit_tokens + gained.hit_tokens, copied_tokens=use.found.copied_tokens + copied)
        return gained.hit_tokens

    def next_key(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch]) -> bytes | None:
        """The key of the next block that `user` will have computed wholly; None when not all its tokens are known."""
        use = self._current(user, ids, stretches)
        end = use.start + BLOCK_TOKENS
        return token_key(use.parent, use.packed(end)) + use.timeline.at(end).key if end <= len(ids) else None

    def reserve(self, user: int, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens of `user`; those that nobody held for the longest time are given away for them.

        False, and nothing changes, when too few are free.
        """
        table = self._users[user].table
        need = blocks_for(tokens) - len(table.blocks)
        return need <= 0 or self._blocks.grow(table, need, user)

    def commit(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch], stored: int) -> None:
        """The first `stored` tokens are computed now, under `stretches`. Whole blocks become findable, the first of equal ones.

        Raises ValueError when there are no blocks for so many.
        """
        use = self._current(user, ids, stretches)
        if blocks_for(stored) > len(use.table.blocks) or stored < use.stored:
            raise ValueError(f"request {user} has {use.stored} tokens in {len(use.table.blocks)} KV blocks; {stored} were committed")
        computed = use.packed(stored // BLOCK_TOKENS * BLOCK_TOKENS)
        for place in range(0, len(computed), BLOCK_BYTES):
            self._add(user, use, computed[place : place + BLOCK_BYTES])
        use.stored = stored
        use.found = None
        self._others.go_on(user, use)

    def rewind(self, user: int, stored: int) -> None:
        """Forget what comes after the first `stored` tokens, so that it is computed again; blocks behind them are given back.

        A block within which they end is copied first if it can be found or others hold it. Where no block is free for that, it is
        written over if only `user` holds it (and found no more), else left out: `stored` of the user is less then.
        """
        use = self._users[user]
        if stored > use.stored:
            raise ValueError(f"request {user} has {use.stored} tokens stored and cannot go back to {stored}")
        whole, part = divmod(stored, BLOCK_TOKENS)
        self._blocks.drop(use.table.cut(blocks_for(stored)))
        del use.keys[whole:]
        use.stored = stored
        if part and not self._blocks.make_writable(use.table, whole, part, user):
            self._blocks.drop(use.table.cut(whole))
            use.stored = whole * BLOCK_TOKENS

    def end(self, user: int, keep: bool = True) -> None:
        """Close the table of `user`. What can be found stays so, its partial last block too.

        Without `keep` what it computed is forgotten, as far as nobody else holds it.
        """
        use = self._users.pop(user)
        last = use.packed(use.stored)
        if keep and last:
            self._add(user, use, last)
        if use.found is not None:
            self._others.withdraw(user)
            self._count(user, use.found, -1)
        self._blocks.drop(use.table.blocks, None if keep else user)

    def clear(self, because: str, digests: Collection[str] | None = None) -> int:
        """Forget what nobody holds; with `digests` only what was computed with one of these adapters. Returns how many blocks.

        `because` goes on the sentence "cleared 3 s ago: ...".
        """
        return self._blocks.clear(because, digests)

    def count_preemption(self) -> None:
        """A request had to give its blocks back before it ended."""
        self._blocks.counts["preemptions"] += 1

    def view(self, running: Iterable[tuple[int, Mix]], nbytes: int = 0) -> KvView:
        """All of it for a panel; `running`: the requests to name as owners, with their mixes; `nbytes`: of the whole memory."""
        view = kv_view(self._blocks, self._users, running)
        return msgspec.structs.replace(view, bytes=nbytes, counters=KvCounters(**self._blocks.counts))

    def _current(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch]) -> Use:
        use = self._users[user]
        use.set(ids, stretches)
        return use

    def _add(self, user: int, use: Use, ids: bytes) -> None:
        """The block that was computed now, with the tokens `ids`, can be found."""
        parent, start, end = use.parent, use.start, use.start + len(ids) // ID_BYTES
        key = token_key(parent, ids)
        self._blocks.add(use.table.blocks[start // BLOCK_TOKENS], parent, ids, start, use.timeline.at(end), user, key)
        if end - start == BLOCK_TOKENS:
            use.keys.append(key)

    def _count(self, user: int, found: CacheUse, sign: int) -> None:
        if user >= 0:
            counts = self._blocks.counts
            counts["looked_up_tokens"] += sign * (found.prompt_tokens - 1)
            for name in ("hit_tokens", "copied_tokens", "llama_cpp_tokens", "llama_cpp_cleared", "name_keyed_wrong"):
                counts[name] += sign * getattr(found, name)

    def _match(self, use: Use) -> None:
        """Hold the whole blocks that are found of the user's tokens from the stored ones on."""
        rest, parent, keys, end, find = use.packed(use.limit), use.parent, use.keys, use.start, self._blocks.index.find
        found: list[int] = []
        for place in range(0, len(rest) - BLOCK_BYTES + 1, BLOCK_BYTES):
            parent = token_key(parent, rest[place : place + BLOCK_BYTES])
            end += BLOCK_TOKENS
            filled = find(parent, use.timeline.at(end))
            if filled is None:
                break
            found.append(filled.block)
            keys.append(parent)
        if found:
            self._blocks.put(use.table, len(keys) - len(found), found)
            use.stored = use.start

    def _copy_beginning(self, user: int, use: Use) -> tuple[int, bool]:
        """Copy the beginning of a block that goes on as the user's tokens do, if there is one. Returns (tokens gained, whether a copy
        lacked a block).

        Even one token pays: it takes a pass through all weights, where the copy moves its keys and values (15 tokens of the default
        model, 30 layers: 0.1 ms).
        """
        start = use.start
        had, ids = use.stored - start, use.packed(min(start + BLOCK_TOKENS, use.limit))
        history, best, source = use.timeline.at(start + BLOCK_TOKENS), had, None
        for filled in self._blocks.index.alike(use.parent, ids) if ids else ():
            count = 0 if filled.gone else filled.agrees(ids, start, history)
            if count > best:
                best, source = count, filled
        if source is None:
            return 0, False
        if not self._blocks.copy_beginning(source, best, use.table, start // BLOCK_TOKENS, user):
            return 0, True
        use.stored = start + best
        return best - had, False

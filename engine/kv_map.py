"""The KV memory as a panel shows it: who has what, in the order of the blocks."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from .blocks import BLOCK_TOKENS
from .kv_blocks import KvBlocks
from .kv_keys import History
from .kv_use import Use
from .protocol.kv import KvOwner, KvRun, KvView
from .protocol.words import AdapterUse, Mix

FREE = -1


def kv_view(blocks: KvBlocks, users: Mapping[int, Use], running: Iterable[tuple[int, Mix]]) -> KvView:
    """The view without bytes and counters. One pass over the blocks, some 2 ms for 8192."""
    pool, mixes = blocks.pool, dict[Mix, int]()
    numbers: dict[History, int] = {}

    def number(history: History) -> int:
        found = numbers.get(history)
        if found is None:
            mix = tuple(AdapterUse(each.name, each.scale) for each in history.acting)
            found = numbers[history] = mixes.setdefault(mix, len(mixes))
        return found

    what, who = [FREE] * pool.blocks, [()] * pool.blocks
    for block, filled in blocks.index.blocks():
        what[block] = number(filled.history)
    shared: dict[int, int] = dict.fromkeys(users, 0)
    for user in sorted(users):
        use = users[user]
        for at, block in enumerate(use.table.blocks):
            who[block] += (user,)
            shared[user] += pool.holders(block) > 1
            if what[block] == FREE:
                what[block] = number(use.timeline.at(max(min((at + 1) * BLOCK_TOKENS, use.stored), 1)))
    runs, first = [], 0
    for (mix, holders), group in groupby(zip(what, who, strict=True)):
        count = len(list(group))
        runs.append(KvRun(first, count, mix, holders))
        first += count
    owners = tuple(
        KvOwner(user, len(users[user].table.blocks), users[user].stored, mix, shared[user]) for user, mix in running if user in users)
    return KvView(block_tokens=BLOCK_TOKENS, blocks=pool.blocks, held=pool.blocks - pool.free, cached=pool.kept, owners=owners,
                  mixes=tuple(mixes), runs=tuple(runs))

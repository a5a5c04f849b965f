"""Which blocks of a prompt were not found, and why each of them is not there."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .blocks import BLOCK_TOKENS, blocks_for
from .kv_index import KvIndex
from .kv_keys import BLOCK_BYTES, ID_BYTES, token_key
from .kv_reasons import NEW, NO_ROOM, Reason, Reasons, ago
from .kv_use import Use
from .protocol.kv import MissedRun

MOST_RUNS = 8
"""reasons that are told of one prompt"""


def missed_blocks(use: Use) -> int:
    """Blocks that hold tokens which might be found and are not stored."""
    return blocks_for(use.limit - use.start) if use.stored < use.limit else 0


def missed_runs(use: Use, index: KvIndex, now: float, lacking: bool) -> tuple[MissedRun, ...]:
    """Why they are not there: the first `MOST_RUNS` reasons. `now`: by the memory's clock; `lacking`: the beginning of the first one is
    there, and no block was free to copy it into."""
    runs: list[_Run] = []
    token = use.stored
    for blocks, reason in _reasons(use, index, lacking) if missed_blocks(use) else ():
        last = runs[-1] if runs else None
        if last is not None and (last.reason.kind, last.reason.text) == (reason.kind, reason.text):
            last.blocks += blocks
            last.oldest, last.newest = min(last.oldest, reason.when), max(last.newest, reason.when)
        elif len(runs) == MOST_RUNS:
            break
        else:
            runs.append(_Run(token, blocks, reason, reason.when, reason.when))
        token = (token // BLOCK_TOKENS + blocks) * BLOCK_TOKENS
    return tuple(run.told(now) for run in runs)


@dataclass(slots=True)
class _Run:
    token: int
    blocks: int
    reason: Reason
    oldest: float
    newest: float
    """when the first and the last of them went"""

    def told(self, now: float) -> MissedRun:
        kind, text = self.reason.kind, self.reason.text
        if kind in ("evicted", "cleared"):
            first, last = ago(now - self.oldest), ago(now - self.newest)
            text = f"{kind} {first if first == last else f'{first} to {last}'}{text}"
        return MissedRun(self.token, self.blocks, kind, text)


def _reasons(use: Use, index: KvIndex, lacking: bool) -> Iterator[tuple[int, Reason]]:
    """(blocks, why they are not there), from the first one that was not found on.

    Behind a block whose tokens nobody is known to have had, all are new: no key is computed for them. What explained a block explains the
    next one, where it went on with the same tokens; so a long prompt under another mix costs some 3 us a block, however many mixes there
    were. (It is not asked there whether another mix has come nearer.)
    """
    reasons, parent, before, had = Reasons(use.timeline), use.parent, use.start, use.stored - use.start
    ids = use.packed(len(use.ids) if len(use.ids) % BLOCK_TOKENS == 0 else use.limit)
    reason, teller, acts, steady, ends = NEW, None, None, False, False
    for place in range(0, len(ids), BLOCK_BYTES):
        block = ids[place : place + BLOCK_BYTES]
        key, last_acts = token_key(parent, block), acts
        acts = use.timeline.at(before + len(block) // ID_BYTES)
        known = (index.remembered(key, acts) or index.remembered(key, teller.history)) if teller else None
        if not (steady and acts is last_acts and known and known.gone is teller.gone and known.history is teller.history):
            alike = [known] if known else [*index.alike(parent, block)]
            reason, teller = reasons.of(block, before, had, alike)
            steady = teller is not None and max(acts.start, teller.history.start) <= before  # nothing begins to act inside the block
            ends = not any(each.key == key for each in alike)
        yield 1, NO_ROOM if lacking and not place else reason
        if ends:
            break
        parent, before, had = key, before + BLOCK_TOKENS, 0
    if behind := (len(ids) - place - 1) // BLOCK_BYTES:
        yield behind, NEW

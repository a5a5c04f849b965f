"""What other rules for keeping keys and values would have found, beside ours."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import BLOCK_TOKENS
from .kv_index import KvIndex
from .kv_keys import BLOCK_BYTES, Timeline, token_key
from .kv_use import Use


class OneSlot:
    """llama-server's rule, for one slot (tools/server/server-context.cpp and server-common.cpp as of 2026).

    A slot holds the tokens of its last request, and the next one reuses the longest common beginning. It is cleared first when the
    adapters or scales of the two differ; unless those of the next are aLoRAs only, and those of the last too or none: then the
    tokens up to the one before the invocation may be reused. (A mix whose adapters all begin to act after the first token is taken for
    one of aLoRAs.) Where that rule reuses what was computed otherwise, it counts all the same.
    """

    def __init__(self) -> None:
        self._last: list[_InSlot] = []
        """the last request, then those that have begun and computed nothing yet"""

    def begin(self, user: int, use: Use, index: KvIndex) -> tuple[int, int]:
        """`user` is the next one in the slot. Returns (tokens that it would have had, blocks that would have been cleared for it and that
        `index` has not lost)."""
        last = self._last[-1] if self._last else None
        self._last.append(_InSlot(user, use.ids, use.timeline, use.keys))
        if last is None:
            return 0, 0
        if _cleared(last.timeline, use.timeline):
            return 0, last.whole_blocks(index)
        return _kept(last, use.ids, use.timeline), 0

    def go_on(self, user: int, use: Use) -> None:
        """`user` computes: what was in the slot before it is gone."""
        for at, other in enumerate(self._last):
            if other.user == user:
                self._last[: at + 1] = [_InSlot(user, use.ids, use.timeline, use.keys)]
                return

    def withdraw(self, user: int) -> None:
        """`user` ended before it computed anything."""
        self._last = [last for last in self._last if last.user != user]


@dataclass(frozen=True, slots=True)
class _InSlot:
    """A request as the slot has it."""

    user: int
    ids: Sequence[int]
    timeline: Timeline
    keys: Sequence[bytes]
    """token keys of the blocks that are computed or found"""

    def whole_blocks(self, index: KvIndex) -> int:
        """Its whole blocks but for those that `index` had and lost."""
        count = (len(self.ids) - 1) // BLOCK_TOKENS
        lost = (index.find(key, self.timeline.at((at + 1) * BLOCK_TOKENS)) is None for at, key in enumerate(self.keys[:count]))
        return count - sum(lost)


def named_wrong(use: Use, index: KvIndex) -> int:
    """Tokens beyond those stored that a cache which knows adapters by name alone (vLLM's kind) would have reused, though other content or
    another scale acted. (Theirs names a request's adapter on all its tokens; here it counts where it acts, to their credit.)"""
    parent, end, wrong, ids = use.parent, use.start, 0, use.packed(use.limit)
    for place in range(0, len(ids) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block, end = ids[place : place + BLOCK_BYTES], end + BLOCK_TOKENS
        key, history = token_key(parent, block), use.timeline.at(end)
        if not index.has_named(key, history):
            break
        wrong += BLOCK_TOKENS * (index.find(key, history) is None)
        parent = key
    return wrong


def _cleared(last: Timeline, timeline: Timeline) -> bool:
    """Whether the slot is cleared of a request for the next one."""
    return _mix(last) != _mix(timeline) and not (_late(timeline) and (not last.last.acting or _late(last)))


def _kept(last: _InSlot, ids: Sequence[int], timeline: Timeline) -> int:
    """Tokens that the next request has of one that is not cleared."""
    limit = len(ids) - 1
    if _late(timeline):
        limit = min(limit, timeline.histories[1].start - 1)
    return max(0, min(_common(last.ids, ids), len(last.ids) - 1, limit))


def _mix(timeline: Timeline) -> frozenset[tuple[str, float]]:
    return frozenset((each.digest, each.scale) for each in timeline.last.acting)


def _late(timeline: Timeline) -> bool:
    return bool(timeline.last.acting) and timeline.histories[1].start > 0


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    most, count = min(len(a), len(b)), 0
    while count < most and a[count : count + 64] == b[count : count + 64]:
        count += 64
    while count < most and a[count] == b[count]:
        count += 1
    return min(count, most)

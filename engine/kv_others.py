"""What other rules for keeping keys and values would have found, beside ours."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from .kv_index import Filled
from .kv_keys import History, Timeline


class OneSlot:
    """llama-server's rule, for one slot (tools/server/server-context.cpp and server-common.cpp as of 2026).

    A slot holds the tokens of its last request, and the next one reuses the longest common beginning. It is cleared first when the
    adapters or scales of the two differ; unless those of the next are aLoRAs only, and those of the last too or none: then the
    tokens up to the one before the invocation may be reused. (A mix whose adapters all begin to act after the first token is taken for
    one of aLoRAs.) Where that rule reuses what was computed otherwise, it counts all the same.
    """

    def __init__(self) -> None:
        self._ids: Sequence[int] = ()
        self._timeline = Timeline(())
        self.user: int | None = None

    def found(self, ids: Sequence[int], timeline: Timeline) -> int:
        """Tokens that a request with these ids would have had."""
        last, limit = self._timeline, len(ids) - 1
        if _mix(last) != _mix(timeline):
            if not (_late(timeline) and (not last.last.acting or _late(last))):
                return 0
        if _late(timeline):
            limit = min(limit, timeline.histories[1].start - 1)
        return max(0, min(_common(self._ids, ids), len(self._ids) - 1, limit))

    def take(self, user: int, ids: Sequence[int], timeline: Timeline) -> None:
        """The slot is that of `user`, whose tokens are `ids`, all but the last one computed."""
        self.user, self._ids, self._timeline = user, ids, timeline


def named_alike(alike: Iterable[Filled], key: bytes, history: History) -> bool | None:
    """Whether a cache that knows adapters by name alone (vLLM's kind) would take one of `alike` for the block with this token key.

    None: no; False: it would, rightly; True: it would, though other content or another scale acted. (Theirs names a request's adapter on
    all its tokens; here it counts where it acts, to their credit.)
    """
    found: bool | None = None
    for filled in alike:
        if filled.gone is None and filled.key == key and filled.history.names == history.names:
            if filled.history.key == history.key:
                return False
            found = True
    return found


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

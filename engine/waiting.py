"""What is told to requests that wait."""
from __future__ import annotations

from collections.abc import Sequence

from .group import Group
from .protocol import Emit, RequestQueued, requests_text
from .scheduler import Slots

_TURN = "its turn comes after"


def tell_waiting(queue: Sequence[Group], because: str, slots: Slots, emit: Emit) -> None:
    """What the first waits for, when that changed; of each other once that it is not its turn, and when its adapters are read."""
    turn = f"{_TURN} {requests_text(request.id for request in queue[0].requests)}"
    for place, group in enumerate(queue):
        reason = slots.reading(group) or turn if place else because
        for request in group.requests:
            told_turn = place and reason is turn and request.waits_for.startswith(_TURN)
            if request.waits_for != reason and not told_turn:
                request.waits_for = reason
                emit(RequestQueued(request.id, reason))

"""What is told to requests that wait."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from .group import Group
from .protocol import Emit, RequestQueued, requests_text
from .scheduler import LOOKED_AT

_TURN = "its turn comes after"


def tell_waiting(queue: Sequence[Group], because: str, reading: Callable[[Group], str], emit: Emit) -> None:
    """What the first waits for, when that changed; of each other once that it is not its turn, and what `reading` says of it.

    Of the many behind the first LOOKED_AT only those are looked at that were told nothing yet: the last ones that came.
    """
    turn = f"{_TURN} {requests_text(request.id for request in queue[0].requests)}"
    for place, group in enumerate(islice(queue, LOOKED_AT)):
        _tell(group, reading(group) or turn if place else because, emit, again=not place)
    for group in islice(reversed(queue), max(len(queue) - LOOKED_AT, 0)):
        if all(request.waits_for for request in group.requests):
            return
        _tell(group, turn, emit, again=False)


def _tell(group: Group, reason: str, emit: Emit, again: bool) -> None:
    """`again`: also those who know that it is not their turn, whose turn that is by now."""
    for request in group.requests:
        told_turn = not again and reason.startswith(_TURN) and request.waits_for.startswith(_TURN)
        if request.waits_for != reason and not told_turn:
            request.waits_for = reason
            emit(RequestQueued(request.id, reason))

"""Requests computed beside those of the people: nothing is drawn and nothing emitted but the moves of adapters."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .loaded import LoadedModel
from .request import Request
from .scheduler import Scheduler


@contextmanager
def look(model: LoadedModel, requests: Sequence[Request], because: str) -> Iterator[Scheduler]:
    """A scheduler of `requests` alone; they hold KV blocks and slots until the end. `because` completes "needed a slot for ...".

    Raises ValueError when one of them could not be a request, or all together want more slots or KV blocks than are free.
    """
    scheduler = Scheduler(model.scheduler.pool, model.config.step_tokens, len(requests))
    for request in requests:
        scheduler.add(request)
    try:
        for request in requests:
            _, lacks = scheduler.next_admitted(lambda request: model.store.acquire(request.mix.names, request.id, because) or "")
            if lacks:
                raise ValueError(f"{because} over {len(request.ids)} tokens cannot be had now: {lacks}")
        yield scheduler
    finally:
        for request in requests:
            model.store.release(request.id)
            scheduler.remove(request)

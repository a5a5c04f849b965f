"""Requests computed beside those of the people: nothing is drawn and nothing emitted but the moves of adapters."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .loaded import LoadedModel
from .request import Request
from .scheduler import Scheduler


@contextmanager
def look(model: LoadedModel, requests: Sequence[Request], because: str, wanted_from: int | None = 0) -> Iterator[Scheduler]:
    """A scheduler of `requests` alone; they hold KV blocks and slots until the end. `because` completes "needed a slot for ...".

    `wanted_from`: the first token whose logits are wanted, None for the last one; what lies before it is taken from the KV memory where
    it is there. They get all their blocks at once, those that nobody holds, and never take any from people's requests. Raises ValueError
    when one of them could not be a request, or all together want more slots or KV blocks than are free.
    """
    scheduler = Scheduler(model.memory, model.config.step_tokens, len(requests), model.base.facts.long_after)
    try:
        model.store.exchange({request.id: request.history.names for request in requests}, {}, because)
        for request in requests:
            request.wanted_from = wanted_from
            request.holds_former = True
            if lacks := scheduler.run_whole(request):
                raise ValueError(f"{because} over {len(request.ids)} tokens cannot be had now: {lacks}")
        yield scheduler
    finally:
        for request in scheduler.running:
            scheduler.remove(request)
        for request in requests:
            model.store.release(request.id)

"""What KV memory had of a prompt, and why not more, in words. Names in them are not cleaned."""
from __future__ import annotations

from ..engine.protocol import CacheUse, KvCounters
from .text import counted


def prefix_text(cache: CacheUse) -> str:
    """`prefix 288 hit / 24 new`, and in a clause what stood in the way of more; nothing does where all that follows is new."""
    why = "" if cache.miss == "new tokens" else why_text(cache)
    return f"prefix {cache.hit_tokens} hit / {cache.prompt_tokens - cache.hit_tokens} new" + (f": {why}" if why else "")


def why_text(cache: CacheUse) -> str:
    """Why the first block that was not there is missing; "" when all was there."""
    if not cache.detail:
        return cache.miss
    return f"mix differs, {cache.detail}" if cache.miss == "mix differs" else cache.detail


def started_text(request_id: int, cache: CacheUse) -> str:
    """The same as a line of the log, with the blocks."""
    blocks = counted(cache.hit_blocks, "block") + (f", {cache.copied_tokens} tok copied" if cache.copied_tokens else "")
    reused = f" ({blocks})" if cache.hit_tokens else ""
    why = why_text(cache)
    return f"request {request_id}: {cache.hit_tokens} of {cache.prompt_tokens} prompt tok reused{reused}" + (f" · {why}" if why else "")


def hit_text(counters: KvCounters) -> str:
    """The share of looked-up tokens that were there: `92%`; `–` before anything was looked up."""
    return f"{counters.hit_tokens / counters.looked_up_tokens:.0%}" if counters.looked_up_tokens else "–"

"""What the KV memory holds, what a request found in it, and why not more."""
from __future__ import annotations

from typing import Literal

from .words import Mix, Struct

MissKind = Literal["", "new tokens", "mix differs", "content changed", "positions differ", "evicted", "cleared", "no room"]
"""positions differ: other RoPE factors turned them; no room: it could be copied, but no block was free for that"""


class CacheUse(Struct):
    """What a request found of its prompt when it began (or began again after a preemption)."""

    prompt_tokens: int
    hit_tokens: int = 0
    """whose keys and values were there, the copied ones included"""
    hit_blocks: int = 0
    """whole blocks, shared with whoever else has them"""
    copied_tokens: int = 0
    """of a block that is the same only at its beginning; copied into a block of the request's own"""
    miss: MissKind = ""
    """why the first block that was looked for and not found is not there; "" when everything was"""
    detail: str = ""
    """the reason in one clause: which adapter, its scale then and now; when and for whom it was evicted"""
    base_tokens: int = 0
    """of the hit tokens, those on which no adapter acts"""
    llama_cpp_tokens: int = 0
    """what llama-server's rule for one slot would have had: the tokens of the last request, cleared when adapters or scales differ unless
    all of the next are aLoRAs"""
    name_keyed_wrong: int = 0
    """what a cache that knows adapters by name alone would have reused beyond ours: computed with other content or another scale"""


class CacheCleared(Struct):
    """Blocks were forgotten though there was room."""

    blocks: int
    because: str


class KvEvicted(Struct):
    """Blocks that nobody held were given to a request, the longest unused first."""

    blocks: int
    request_id: int
    oldest_s: float
    """seconds since the first of them was last used"""


class RequestPreempted(Struct):
    """KV memory ran out: the request waits again; its tokens stay and are computed again, as far as their blocks are gone then."""

    request_id: int
    because: str
    tokens: int
    """that were stored"""


class KvOwner(Struct):
    """A running request."""

    request_id: int
    blocks: int
    tokens: int
    """whose keys and values are stored"""
    mix: Mix = ()
    shared: int = 0
    """of its blocks, those that other running requests hold too"""


class KvRun(Struct):
    """Consecutive blocks that are alike, for a map of the memory."""

    first: int
    count: int
    mix: int
    """index into KvView.mixes: what acted on their last token; -1 when free"""
    requests: tuple[int, ...] = ()
    """running requests that hold them; none for blocks that are only kept to be found again"""


class KvCounters(Struct):
    """Since the base was loaded."""

    looked_up_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    evicted_blocks: int = 0
    cleared_blocks: int = 0
    preemptions: int = 0
    llama_cpp_tokens: int = 0
    """as CacheUse has it, added up: what that rule would have hit"""
    name_keyed_wrong: int = 0


class KvView(Struct):
    block_tokens: int = 0
    blocks: int = 0
    bytes: int = 0
    held: int = 0
    """blocks of running requests"""
    cached: int = 0
    """blocks that nobody holds and that can be found again"""
    owners: tuple[KvOwner, ...] = ()
    mixes: tuple[Mix, ...] = ()
    """the empty one is the base"""
    runs: tuple[KvRun, ...] = ()
    """in the order of the blocks, without a gap"""
    counters: KvCounters = KvCounters()

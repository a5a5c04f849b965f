"""What the KV memory holds, what a request found in it, and why not more."""
from __future__ import annotations

from typing import Literal

from .words import Mix, Struct

MissKind = Literal["new tokens", "mix differs", "content changed", "positions differ", "evicted", "cleared", "no room", "behind a gap"]
"""new tokens: nothing is remembered of them after all that comes before them in the prompt; positions differ: other RoPE factors turned
them; no room: it could be copied, but no block was free for that; behind a gap: it is there, but a block before it is missing"""


class MissedRun(Struct):
    """Consecutive blocks of a prompt that were not found, for one and the same reason."""

    token: int
    """the first one that was not found: where a block begins, or behind what was copied of it"""
    blocks: int
    kind: MissKind
    detail: str = ""
    """the reason in one clause: which adapter, its scale then and now; when and for whom it was evicted"""


class CacheUse(Struct):
    """What a request found of its prompt when it began (or began again after a preemption)."""

    prompt_tokens: int
    hit_tokens: int = 0
    """whose keys and values were there, the copied ones included"""
    hit_blocks: int = 0
    """whole blocks, shared with whoever else has them"""
    copied_tokens: int = 0
    """of a block that is the same only at its beginning; copied into a block of the request's own"""
    missed_blocks: int = 0
    """that were looked for and are not there, or not to their end; the prompt's last token, which is always computed, is not looked for"""
    missed: tuple[MissedRun, ...] = ()
    """all of them in the order of the prompt and why each is not there; of very many reasons the first ones"""
    remark: str = ""
    """why what is there was not looked for; "" where all was"""
    base_tokens: int = 0
    """of the hit tokens, those on which no adapter acts"""
    llama_cpp_tokens: int = 0
    """what llama-server's rule for one slot would have had: the tokens of the last request, cleared when adapters or scales differ unless
    all of the next are aLoRAs"""
    llama_cpp_cleared: int = 0
    """blocks that this rule would have cleared before this request and ours has not lost. Cleared is all of the last request, where the
    rule says so; counted are its whole blocks, without those that were evicted or cleared here since it computed them"""
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
    llama_cpp_cleared: int = 0
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

"""What KV memory had of a prompt and why not more, in words. Names in them are not cleaned."""
from __future__ import annotations

from ..engine.protocol import CacheUse, KvCounters, MissedRun
from .text import counted


def prefix_text(cache: CacheUse) -> str:
    """`prefix 288 hit / 24 new`, and what stood in the way of more: tokens that are new do not."""
    in_the_way = [run for run in cache.missed if run.kind != "new tokens"]
    whys = [_run_text(run, cache) for run in in_the_way]
    if in_the_way and (untold := _untold(cache)):
        whys.append(untold)
    why = "; ".join(filter(None, (*whys, cache.remark)))
    return f"prefix {cache.hit_tokens} hit / {cache.prompt_tokens - cache.hit_tokens} new" + (f": {why}" if why else "")


def started_text(request_id: int, cache: CacheUse) -> str:
    """The same as a line of the log: blocks that were there, each one that was missed with its reason, and what llama.cpp's rule would
    have cleared."""
    blocks = counted(cache.hit_blocks, "block") + (f", {cache.copied_tokens} tok copied" if cache.copied_tokens else "")
    reused = f" ({blocks})" if cache.hit_tokens else ""
    parts = [f"request {request_id}: {cache.hit_tokens} of {cache.prompt_tokens} prompt tok reused{reused}"]
    if cache.missed:
        whys = [*(_run_text(run, cache) for run in cache.missed), _untold(cache)]
        parts.append(f"{counted(cache.missed_blocks, 'block')} missed: {'; '.join(filter(None, whys))}")
    if cache.remark:
        parts.append(cache.remark)
    if cache.llama_cpp_cleared:
        parts.append(f"llama.cpp's rule would have cleared {counted(cache.llama_cpp_cleared, 'block')} first")
    return " · ".join(parts)


def hit_text(counters: KvCounters) -> str:
    """The share of looked-up tokens that were there: `92%`; `–` before anything was looked up."""
    return f"{counters.hit_tokens / counters.looked_up_tokens:.0%}" if counters.looked_up_tokens else "–"


def _run_text(run: MissedRun, cache: CacheUse) -> str:
    """Why its blocks are missing; which these are where others have other reasons."""
    why = f"mix differs, {run.detail}" if run.kind == "mix differs" and run.detail else run.detail or run.kind
    return why if run.blocks == cache.missed_blocks else f"{counted(run.blocks, 'block')} from token {run.token} – {why}"


def _untold(cache: CacheUse) -> str:
    """How many blocks have reasons that are not listed."""
    count = cache.missed_blocks - sum(run.blocks for run in cache.missed)
    return f"{counted(count, 'block')} behind them for other reasons" if count else ""

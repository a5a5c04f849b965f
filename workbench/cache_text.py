"""What KV memory had of a prompt and why not more, in words. Names in them are not cleaned."""
from __future__ import annotations

from ..engine.protocol import CacheUse, KvCounters, MissedRun
from .text import counted


def prefix_text(cache: CacheUse) -> str:
    """`prefix 288 hit / 24 new`, and what stood in the way of more."""
    why = "; ".join((*_in_the_way(cache), *filter(None, (cache.remark,))))
    return f"prefix {cache.hit_tokens} hit / {cache.prompt_tokens - cache.hit_tokens} new" + (f": {why}" if why else "")


def started_text(request_id: int, cache: CacheUse) -> str:
    """The same as a line of the log, with the blocks."""
    return _line(request_id, cache, _in_the_way(cache) or _whys(cache))


def found_text(request_id: int, cache: CacheUse) -> str:
    """All of it: each block that was missed with its reason, and what llama.cpp's rule would have cleared."""
    line = _line(request_id, cache, _whys(cache))
    cleared = counted(cache.llama_cpp_cleared, "block")
    return f"{line} · llama.cpp's rule would have cleared {cleared} first" if cache.llama_cpp_cleared else line


def hit_text(counters: KvCounters) -> str:
    """The share of looked-up tokens that were there: `92%`; `–` before anything was looked up."""
    return f"{counters.hit_tokens / counters.looked_up_tokens:.0%}" if counters.looked_up_tokens else "–"


def _line(request_id: int, cache: CacheUse, whys: list[str]) -> str:
    blocks = counted(cache.hit_blocks, "block") + (f", {cache.copied_tokens} tok copied" if cache.copied_tokens else "")
    reused = f" ({blocks})" if cache.hit_tokens else ""
    missed = f"{counted(cache.missed_blocks, 'block')} missed: {'; '.join(whys)}" if whys else ""
    found = f"request {request_id}: {cache.hit_tokens} of {cache.prompt_tokens} prompt tok reused{reused}"
    return " · ".join(filter(None, (found, missed, cache.remark)))


def _in_the_way(cache: CacheUse) -> list[str]:
    """Why blocks are missing, but for those whose tokens are new."""
    whys = [_run_text(run, cache) for run in cache.missed if run.kind != "new tokens"]
    return whys + _untold(cache) if whys else []


def _whys(cache: CacheUse) -> list[str]:
    return [*(_run_text(run, cache) for run in cache.missed), *_untold(cache)]


def _run_text(run: MissedRun, cache: CacheUse) -> str:
    """Why its blocks are missing; which these are where others have other reasons."""
    why = f"mix differs, {run.detail}" if run.kind == "mix differs" and run.detail else run.detail or run.kind
    return why if run.blocks == cache.missed_blocks else f"{counted(run.blocks, 'block')} from token {run.token} – {why}"


def _untold(cache: CacheUse) -> list[str]:
    """How many blocks have reasons that are not listed."""
    count = cache.missed_blocks - sum(run.blocks for run in cache.missed)
    return [f"{counted(count, 'block')} behind them for other reasons"] if count else []

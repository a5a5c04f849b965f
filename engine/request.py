"""One request from its prompt to its last token."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..kernels.sampling import Draw
from .blocks import BlockTable
from .kv_memory import KvMemory
from .mix import Awaited, TokenMix
from .mix_history import MixHistory
from .protocol import CacheUse, RequestStats, Sampling
from .seen_ids import SeenIds
from .stop_text import StopText
from .tokenizer import TextStream
from .vocabulary import Vocabulary

Reason = Literal["stop", "length", "context", "memory", "aborted"]
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
"""bounds the look at every new piece of text"""


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError naming the first setting that has no meaning."""
    rules = {
        "temperature": (sampling.temperature, math.isfinite(sampling.temperature) and sampling.temperature >= 0, "0 (greedy) or more"),
        "top_k": (sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "over 0, up to 1 (off)"),
        "min_p": (sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 (off) to 1"),
        "repetition_penalty": (sampling.repetition_penalty, 0.01 <= sampling.repetition_penalty <= 100, "from 0.01 to 100; 1 is off"),
        "max_tokens": (sampling.max_tokens, sampling.max_tokens >= 1, "1 or more"),
    }
    for name, (value, good, expected) in rules.items():
        if not good:
            raise ValueError(f"{name} is {value}; it must be {expected}")
    if len(sampling.stop) > MAX_STOPS:
        raise ValueError(f"{len(sampling.stop)} stop strings are given; at most {MAX_STOPS} are awaited for")
    for stop in sampling.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"a stop string has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARACTERS}")


@dataclass(slots=True, eq=False)
class Request:
    """`ids` grows by the tokens drawn; the first `stored` of them have keys and values in the blocks of `table`, while it has one."""

    id: int
    ids: list[int]
    prompt_tokens: int
    history: MixHistory
    sampling: Sampling
    limit: int
    """tokens that `ids` may grow to"""
    context: int
    end_tokens: frozenset[int]
    text: TextStream
    stops: StopText
    vocabulary: Vocabulary
    wanted_from: int | None = None
    """the first token whose logits are wanted: what lies before it may be found instead of computed; None for the last one"""
    long: bool = False
    """computed by the RoPE factors of long requests (see Scheduler)"""
    waits_for: str = ""
    holds_former: bool = False
    """the slots of its former mixes as well, to compute again under them"""
    remark: str = ""
    """what is to be said when it goes on, of its former mixes"""
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    _memory: KvMemory | None = None
    _seen: SeenIds = field(default_factory=SeenIds)

    @property
    def mix(self) -> TokenMix:
        """The one that holds now."""
        return self.history.mix

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens known but not yet computed; 1 while decoding."""
        return len(self.ids) - self.stored

    @property
    def settled(self) -> int:
        """Tokens whose successors are known, or stored: what they were computed with is settled."""
        return max(self.stored, len(self.ids) - 1) if self.new_tokens else self.stored

    @property
    def lacks_former(self) -> bool:
        """Whether tokens are to be computed again on which a former mix acts that it holds no slots for."""
        if len(self.history.parts) == 1:
            return False
        *former, now = self.history.parts
        return (not self.holds_former and self._memory is not None and self.stored < now.start
                and any(part.mix.active for part in former))

    @property
    def decoding(self) -> bool:
        return self.new_tokens > 0

    # -- keys and values -------------------------------------------------------------------------
    @property
    def stored(self) -> int:
        return self._memory.stored(self.id) if self._memory is not None else 0

    @property
    def table(self) -> BlockTable | None:
        return self._memory.table_of(self.id) if self._memory is not None else None

    def begin(self, memory: KvMemory) -> CacheUse:
        """Open its table in `memory`, with what is found there."""
        self._memory = memory
        return memory.begin(self.id, self._findable, self.history.stretches, b"long" if self.long else b"")

    def end(self, keep: bool = True) -> None:
        """Give the blocks back. With `keep` what was computed can be found again; nothing happens without a table."""
        if self._memory is not None:
            self._memory.end(self.id, keep)
            self._memory = None

    def extend(self) -> None:
        """Take over what others computed meanwhile of the tokens that come next."""
        findable = self._findable
        if self.stored < len(findable) - 1:
            self._held.extend(self.id, findable, self.history.stretches)

    def next_key(self) -> bytes | None:
        """Of the whole block that it computes next and could as well find; None when what is left does not fill one."""
        return self._held.next_key(self.id, self._findable, self.history.stretches) if self.stored < len(self._findable) - 1 else None

    def reserve(self, tokens: int) -> bool:
        """Blocks for the next `tokens` tokens; False when there are too few, nothing changes then."""
        return self._held.reserve(self.id, self.stored + tokens)

    def commit(self, tokens: int) -> None:
        """The next `tokens` tokens are computed now."""
        self._held.commit(self.id, self.ids, self.history.stretches, self.stored + tokens)

    def rewind(self, stored: int) -> None:
        """Forget what is stored behind the first `stored` tokens, if anything is."""
        if self._memory is not None and stored < self.stored:
            self._memory.rewind(self.id, stored)

    @property
    def _held(self) -> KvMemory:
        assert self._memory is not None  # it runs
        return self._memory

    @property
    def _findable(self) -> list[int]:
        return self.ids if self.wanted_from is None else self.ids[: self.wanted_from + 1]

    # -- tokens ----------------------------------------------------------------------------------
    def written(self) -> Awaited | None:
        """The aLoRA of its mix whose invocation the reply's last tokens are, if it does not act yet."""
        for awaited in self.mix.awaited:
            tokens = awaited.info.invocation_tokens
            if tuple(self.ids[-len(tokens) :]) == tuple(tokens):
                return awaited
        return None

    def draw(self, device: torch.device) -> Draw:
        """How the next token is drawn; its noise belongs to (seed, its position)."""
        s, words = self.sampling, self.vocabulary.head_rows
        seen = self._seen.mask(self.ids, words, device) if s.repetition_penalty != 1.0 else None
        return Draw(s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.seed, len(self.ids), seen, words)

    def accept(self, token: int) -> tuple[str, Reason | None]:
        """Append a drawn token. Returns (text that may be shown now, why the reply ends here or None)."""
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        self.ids.append(token)
        if token in self.end_tokens:
            return self._flush(), "stop"
        shown, stopped = self.stops.push(self.text.push(token))
        if stopped:
            return shown, "stop"
        if len(self.ids) < self.limit:
            return shown, None
        return shown + self._flush(), "length" if self.new_tokens == self.sampling.max_tokens else "context"

    def stats(self) -> RequestStats:
        decode = max(self.last_token - self.first_token, 0.0)
        rate = (self.new_tokens - 1) / decode if decode > 0 and self.new_tokens > 1 else 0.0
        ttft = self.first_token - self.arrived if self.first_token else 0.0
        prefill = self.first_token - self.started if self.first_token else 0.0
        return RequestStats(
            prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, ttft_ms=ttft * 1e3, prefill_ms=prefill * 1e3,
            decode_ms=decode * 1e3, decode_tokens_per_second=rate, seed=self.sampling.seed)

    def _flush(self) -> str:
        """The rest of the text at the end of a reply; a stop string may still complete in it."""
        shown, stopped = self.stops.push(self.text.finish())
        return shown if stopped else shown + self.stops.finish()

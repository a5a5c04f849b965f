"""What an adapter does to the base's words: both over the same tokens, in one batch, position by position."""
from __future__ import annotations

from collections.abc import Generator, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from torch import Tensor

from .alora import find_last
from .blocks import blocks_for
from .chat import prompt_ids
from .check_prompts import PROMPTS
from .divergence import divergence, log_shares
from .loaded import LoadedModel
from .look import look
from .protocol import AdapterInfo, AdapterUse, Chat, Message, PromptEffect, Sampling
from .request import Request
from .scheduler import Work
from .template import ChatTemplateError

if TYPE_CHECKING:
    from .engine import Engine

REPLY_TOKENS = 24
PIECE_TOKENS = 32
"""of each of the two rows of a step: small, so that replies beside a check wait for little"""
FIRST_ID = -1_000_000
"""requests of a check are counted down from here; no person's request has such a number"""


class NotFinite(ArithmeticError):
    """The logits under an adapter hold NaN or infinity."""


def effect_run(engine: Engine, name: str) -> Generator[str, None, tuple[PromptEffect, ...]]:
    """Compare the base with the adapter `name` (loaded, scale 1) over PROMPTS and the base's greedy replies to them.

    A step is computed for every text that is yielded (what is being done); close the generator to give up. An aLoRA is invoked
    behind each prompt, and compared from its invocation on. Raises NotFinite, and ValueError when memory or slots are held by others.
    """
    model = engine.model
    info = model.store.infos[name]
    prompts = [_prompt(model, text, info) for _, text in PROMPTS]
    answered: list[list[int]] = yield from _replies(engine, prompts)
    found = []
    for (kind, _), prompt, ids in zip(PROMPTS, prompts, answered, strict=True):
        part = yield from _compare(engine, kind, ids, len(prompt) - 1, name)
        if part.positions:
            found.append(part)
    return tuple(found)


def _prompt(model: LoadedModel, text: str, info: AdapterInfo) -> list[int]:
    """Token ids of a user's message, ready to be answered; cut at its beginning for a context that is too short for it."""
    chat = Chat((Message("user", text),), opening=info.invocation)
    try:
        ids, _ = prompt_ids(model.tokenizer, model.base.chat_template, chat)
    except ChatTemplateError:  # said when the model was loaded
        ids, _ = prompt_ids(model.tokenizer, None, chat)
    if info.invocation_tokens and find_last(ids, info.invocation_tokens) < 0:
        ids = [*ids, *info.invocation_tokens]
    return list(ids)[-max(model.config.context - REPLY_TOKENS - 2, 1):]


def _replies(engine: Engine, prompts: Sequence[list[int]]) -> Generator[str, None, list[list[int]]]:
    """The prompts with the base's greedy replies behind them, as many in one batch as there are KV blocks for."""
    requests = [engine.make_request(FIRST_ID - i, list(ids), (), Sampling(max_tokens=REPLY_TOKENS + 1)) for i, ids in enumerate(prompts)]
    first = 0
    while first < len(requests):
        end, free = first + 1, engine.model.memory.free - blocks_for(requests[first].limit)
        while end < len(requests) and (free := free - blocks_for(requests[end].limit)) >= 0:
            end += 1
        yield from _reply_together(engine.model, requests[first:end])
        first = end
    return [request.ids for request in requests]


def _reply_together(model: LoadedModel, requests: Sequence[Request]) -> Generator[str, None, None]:
    with look(model, requests, "the base's replies of a check", None) as scheduler:
        while works := scheduler.plan():
            ready = [work.request for work in works if work.sampled]
            for request, row in zip(ready, model.runner.logits(works), strict=True):
                _go_on(request, int(row.argmax()))
            yield "the base replies"


def _go_on(request: Request, token: int) -> None:
    """Take `token` unless it ends the reply: then nothing is pending any more."""
    if token not in request.end_tokens and len(request.ids) + 1 < request.limit:
        request.ids.append(token)


def _compare(engine: Engine, kind: str, ids: list[int], reply: int, name: str) -> Generator[str, None, PromptEffect]:
    """Both over `ids`; the position `reply` is the first that a token of the reply follows."""
    model = engine.model
    sampling = Sampling(max_tokens=1)
    rows = [engine.make_request(FIRST_ID - i, ids, mix, sampling) for i, mix in enumerate(((), (AdapterUse(name),)))]
    start = rows[1].mix.active[0].start if rows[1].mix.active else len(ids)
    tally = _Tally(reply)
    while model.store.lacking([name]):
        yield f"waits for {name} in a slot"
    with look(model, rows, f"the check of {name}"):
        while rows[0].pending:
            position, count = rows[0].stored, min(PIECE_TOKENS, rows[0].pending)
            logits = model.runner.logits([Work(row, count) for row in rows], every=True)
            skip = min(max(start - position, 0), count)
            tally.add(position + skip, logits[skip:count], logits[count + skip:], model.base.facts.vocab)
            yield f"compares: {kind}"
    if not isfinite(tally.kl):
        raise NotFinite(f"the model computes numbers that are not finite with it (prompt: {kind}); its weights or its scale are too large")
    before, after = model.tokenizer.token_text(tally.example) if tally.example else ("", "")
    return PromptEffect(kind, tally.positions, tally.changed, tally.kl / max(tally.positions, 1), before, after)


class _Tally:
    """Sums over positions."""

    def __init__(self, reply: int) -> None:
        self.positions = self.changed = 0
        self.kl = 0.0
        self.example: tuple[int, int] | None = None
        """the likeliest tokens of both at the first change in the reply"""
        self._reply = reply

    def add(self, position: int, base: Tensor, other: Tensor, vocab: int) -> None:
        """Logits [n, vocabulary] of both from `position` on.

        Tokens that an adapter adds have no counterpart in the base and are left out.
        """
        self.kl += divergence(log_shares(base, vocab), log_shares(other, vocab)).sum().item()
        firsts, others = base[:, :vocab].argmax(-1).tolist(), other.argmax(-1).tolist()
        changes = [(first, second, position + i) for i, (first, second) in enumerate(zip(firsts, others, strict=True)) if first != second]
        self.positions += len(firsts)
        self.changed += len(changes)
        in_reply = [(first, second) for first, second, where in changes if where >= self._reply]
        self.example = self.example or next(iter(in_reply), None)

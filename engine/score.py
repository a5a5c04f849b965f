"""One text under several mixes, token by token: what each thinks of it, and how far it is from the first (teacher forcing)."""
from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .alora import find_written
from .chat import check_length, prompt_ids
from .look import look
from .protocol import AdapterUse, Sampling, Score, Scored
from .protocol.words import SCORE_IDS
from .request import Request
from .scheduler import Work
from .score_rows import ScoreRow, add_distances

if TYPE_CHECKING:
    from .engine import Engine

BESIDE_TOKENS = 32
"""of one step while people's requests run: they wait for little"""
STEP_LOGITS = 1 << 23
"""numbers of one step's logits at most: a long text is read in pieces"""
MAX_MIXES = 64
MAX_TOP = 50
MAX_CHANCES = 500_000
"""that are told of one text: what a frame between the processes holds"""


class Reading:
    """One Score as it is computed. Raises ValueError, with the numbers, for a text or mixes that cannot be read."""

    def __init__(self, engine: Engine, command: Score) -> None:
        _check(command)
        self._engine, self._command = engine, command
        self.requests: list[Request] = []
        """that hold slots and KV memory now"""
        self.needs: tuple[str, ...] = ()
        """adapters that the next rows need in slots; while one of them is still to be read or made ready no step is computed"""
        self._acting: list[list[tuple[str, float, int]]] = []
        """(digest, scale, first token) of what acts in each row that is read now or was"""
        model = engine.model
        check_length(command.prompt, model.config.context)
        tokenizer = model.store.vocabulary(command.mixes[0], None).tokenizer
        self._prompt, _ = prompt_ids(tokenizer, model.base.chat_template, command.prompt)
        if (total := len(self._prompt) + len(command.reply)) > model.config.context:
            raise ValueError(f"prompt and reply are {len(self._prompt)} and {len(command.reply)} tokens long, {total} in all, too long for "
                             f"the context of {model.config.context}; shorten them or load the model with a larger context")
        requests = [self._request(i) for i in range(len(command.mixes))]
        self._check_words(requests)
        self._notes = tuple(dict.fromkeys(note for request in requests for note in self._written(request)))

    def steps(self) -> Generator[None, None, Scored]:
        """A step is computed for every yield where there is nothing to wait for; close the generator to give up.

        Raises ValueError when slots or KV memory are held by what does not run, or the logits are not finite.
        """
        rows: list[ScoreRow] = []
        while len(rows) < len(self._command.mixes):  # those that did not fit are read after the others, the first mix beside them again
            rows += yield from self._read_some(len(rows))
        first, vocab = rows[0], self._engine.model.base.facts.vocab
        widest = max(row.vocab for row in rows)
        notes = (f"an adapter adds tokens: KL compares the {vocab:,} of the base alone",) if widest > vocab else ()
        return Scored(self._command.score_id, first.tokens(), tuple(row.told() for row in rows), (*notes, *self._notes))

    def _request(self, number: int) -> Request:
        """A row that has read nothing. An aLoRA of its mix is invoked by the prompt alone, as when the reply was written."""
        sampling = Sampling(max_tokens=len(self._command.reply))
        request = self._engine.make_request(SCORE_IDS - number, list(self._prompt), self._command.mixes[number], sampling)
        request.ids.extend(self._command.reply[:-1])
        return request

    def _check_words(self, requests: Sequence[Request]) -> None:
        ids, first = (*self._prompt, *self._command.reply), requests[0].vocabulary
        outside = next((i for i in self._command.reply if not 0 <= i < first.head_rows), None)
        if outside is not None:
            raise ValueError(f"token id {outside} of the reply is not in the vocabulary of {first.head_rows} tokens")
        for request in requests[1:]:
            lost = request.vocabulary.lost(ids, first)
            if lost is not None:
                raise ValueError(f"the text holds the token {lost}, {first.tokenizer.token_text([lost])[0]!r}, that an adapter of the "
                                 f"first mix adds; the mix {_words(request.mix.mix)} cannot read it")

    def _written(self, request: Request) -> Iterator[str]:
        """What a mix would have begun to do in the reply, had it written it itself."""
        for awaited in request.mix.awaited:
            start = find_written([*self._prompt, *self._command.reply], awaited.info.invocation_tokens, len(self._prompt))
            if start >= 0:
                yield (f"{awaited.name} begins to act where a reply holds its invocation, here at token {start - len(self._prompt)}; "
                       "the figures are without that")

    # -- steps ---------------------------------------------------------------------------------------
    def _read_some(self, start: int) -> Generator[None, None, list[ScoreRow]]:
        """The mixes from `start` on, as many as slots and KV memory hold at once."""
        count = len(self._command.mixes) - start
        while True:
            first = [0] if start else []
            requests = [self._request(i) for i in range(len(self._command.mixes))]
            self._check_content(requests, start)
            rows = [requests[i] for i in (*first, *range(start, start + count))]
            self.needs = tuple(name for request in rows for name in request.history.names)
            while self._engine.model.store.lacking(self.needs):
                yield
            self.requests = rows
            with ExitStack() as held:
                held.callback(self.requests.clear)
                try:
                    held.enter_context(look(self._engine.model, self.requests, "the reading of a text", len(self._prompt) - 1))
                except ValueError:
                    if count == 1 and not (self._engine.busy or self._engine.checks.under_way):
                        raise
                else:
                    return (yield from self._read(self.requests))[len(first):]
            if count > 1:
                count = (count + 1) // 2
            else:
                yield  # until a reply or a check ends

    def _check_content(self, requests: Sequence[Request], start: int) -> None:
        """Of rows that are read in turns each must be computed with what the first ones were."""
        acting = [[(use.digest, use.scale, use.start) for use in request.mix.active] for request in requests]
        if start and acting != self._acting:
            changed = next(request for request, now, then in zip(requests, acting, self._acting, strict=True) if now != then)
            raise ValueError(f"an adapter of the mix {_words(changed.mix.mix)} was reloaded, or begins to act elsewhere, while the text "
                             "was read; score it again")
        self._acting = acting

    def _read(self, requests: Sequence[Request]) -> Generator[None, None, list[ScoreRow]]:
        """All of the text, the rows always at the same token where logits are wanted."""
        runner, reply, first = self._engine.model.runner, self._command.reply, len(self._prompt) - 1
        rows = [ScoreRow(request, reply, self._command.top, self._engine.model.info.dtype) for request in requests]
        while works := self._behind(requests, first):
            runner.logits(works)
            yield
        at, vocab = 0, max(row.vocab for row in rows)
        while at < len(reply):
            count = max(1, min(self._budget(), STEP_LOGITS // vocab) // len(rows))
            count = min(count, len(reply) - at)
            logits = runner.logits([Work(request, count) for request in requests], every=True)
            add_distances(rows, logits.split(count), at, self._engine.model.base.facts.vocab)
            at += count
            yield
        return rows

    def _behind(self, requests: Sequence[Request], end: int) -> list[Work]:
        """The next step of those that have not read the first `end` tokens."""
        works, left = [], self._budget()
        for request in requests:
            if (count := min(end - request.stored, left)) > 0:
                works.append(Work(request, count))
                left -= count
        return works

    def _budget(self) -> int:
        """Tokens of the next step."""
        return BESIDE_TOKENS if self._engine.busy else self._engine.model.config.step_tokens


def _check(command: Score) -> None:
    if not command.reply:
        raise ValueError("the reply holds no token: there is nothing to read")
    if not 1 <= len(command.mixes) <= MAX_MIXES:
        raise ValueError(f"{len(command.mixes)} mixes are given; a text is read under 1 to {MAX_MIXES}")
    if not 1 <= command.top <= MAX_TOP:
        raise ValueError(f"top is {command.top}; it must be from 1 to {MAX_TOP}")
    told = len(command.reply) * len(command.mixes) * command.top
    if told > MAX_CHANCES:
        raise ValueError(f"{len(command.reply)} tokens under {len(command.mixes)} mixes with {command.top} likeliest tokens each are "
                         f"{told:,} figures, over the limit of {MAX_CHANCES:,}; score a shorter text, fewer mixes or a smaller top")


def _words(mix: Sequence[AdapterUse]) -> str:
    return " + ".join(f"{use.name} x {use.scale:g}" for use in mix) or "of the base alone"

"""What is told of a text under one mix, gathered piece by piece out of the logits."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import torch
from torch import Tensor

from .divergence import divergence, log_shares
from .failures import not_finite
from .protocol import ScoredRow, TokenChance
from .request import Request


class ScoreRow:
    """One mix over the tokens of a reply."""

    def __init__(self, request: Request, reply: Sequence[int], top: int, dtype: str) -> None:
        """`top`: likeliest tokens to tell of every position; `dtype`: of the base, for a sentence about logits that are not finite."""
        self.vocab = request.vocabulary.head_rows
        self._request, self._reply, self._dtype = request, reply, dtype
        self._top_count = min(top, self.vocab)
        self._texts: dict[int, str] = {}
        self._logprobs: list[float] = []
        self._kl: list[float] = []
        self._ranks: list[int] = []
        self._top: list[tuple[TokenChance, ...]] = []

    def add(self, logits: Tensor, at: int) -> Tensor:
        """Logits [n, vocab] before the tokens of the reply from `at` on; returns their `log_shares` over its own vocabulary.

        Raises ValueError where they are not finite.
        """
        chosen = torch.tensor(self._reply[at:at + len(logits)], device=logits.device)[:, None]
        logprobs = log_shares(logits, self.vocab)
        own = logprobs.gather(1, chosen)
        values = own[:, 0].tolist()
        if not all(map(isfinite, values)):
            wrong = next(i for i, value in enumerate(values) if not isfinite(value))
            raise ValueError(not_finite(f"token {at + wrong} of the reply", self._request.mix.mix, self._dtype))
        self._logprobs += values
        self._ranks += (1 + (logprobs > own).sum(-1)).tolist()
        best, ids = logprobs.topk(self._top_count, dim=-1)
        self._top += [tuple(map(self._chance, *pair)) for pair in zip(ids.tolist(), best.tolist(), strict=True)]
        return logprobs

    def add_kl(self, values: Iterable[float]) -> None:
        self._kl += values

    def tokens(self) -> tuple[TokenChance, ...]:
        return tuple(map(self._chance, self._reply, self._logprobs))

    def told(self) -> ScoredRow:
        return ScoredRow(self._request.mix.mix, tuple(self._logprobs), tuple(self._kl), tuple(self._ranks), tuple(self._top))

    def _chance(self, number: int, logprob: float) -> TokenChance:
        if number not in self._texts:
            self._texts[number] = self._request.vocabulary.tokenizer.token_text([number])[0]
        return TokenChance(number, self._texts[number], logprob)


def add_distances(rows: Sequence[ScoreRow], logits: Sequence[Tensor], at: int, vocab: int) -> None:
    """A piece of the text for all rows: logits [n, vocab] of each before the tokens from `at` on, and KL(first || row), nats.

    KL is over the first `vocab` tokens, the base's: what an adapter adds has no counterpart in another mix.
    """
    first = _of_base(rows[0].add(logits[0], at), vocab)
    rows[0].add_kl([0.0] * len(first))
    for row, own in zip(rows[1:], logits[1:], strict=True):
        row.add_kl(divergence(first, _of_base(row.add(own, at), vocab)).tolist())


def _of_base(logprobs: Tensor, vocab: int) -> Tensor:
    """The same without tokens beyond `vocab`, their share given to the others."""
    return logprobs if logprobs.shape[-1] == vocab else log_shares(logprobs, vocab)

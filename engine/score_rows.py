"""What is told of a text under one mix, gathered piece by piece out of the logits."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import torch
from torch import Tensor

from .protocol import ScoredRow, TokenChance
from .request import Request


class ScoreRow:
    """One mix over the tokens of a reply. Logits are float64 here: between two mixes that hardly differ, KL is the small difference of
    large sums, in which fp32 leaves noise of 1e-7 that would look like an adapter at work."""

    def __init__(self, request: Request, reply: Sequence[int], top: int) -> None:
        self.vocab = request.vocabulary.head_rows
        self._request, self._reply = request, reply
        self._top_count = min(top, self.vocab)
        self._texts: dict[int, str] = {}
        self._logprobs: list[float] = []
        self._kl: list[float] = []
        self._ranks: list[int] = []
        self._top: list[tuple[TokenChance, ...]] = []

    def add(self, logits: Tensor, at: int) -> Tensor:
        """Logits [n, vocab] before the tokens of the reply from `at` on, -inf beyond its own vocabulary; returns their log-softmax,
        float64. Raises ValueError where they are not finite."""
        chosen = torch.tensor(self._reply[at:at + len(logits)], device=logits.device)[:, None]
        logprobs = torch.log_softmax(logits[:, : self.vocab].double(), -1)
        own = logprobs.gather(1, chosen)
        values = own[:, 0].tolist()
        if not all(map(isfinite, values)):
            wrong = next(i for i, value in enumerate(values) if not isfinite(value))
            mix = ", ".join(f"{use.name} x {use.scale:g}" for use in self._request.mix.mix)
            raise ValueError(f"the model computes numbers that are not finite at token {at + wrong} of the reply "
                             f"({f'mix: {mix}); lower the scales' if mix else 'the base alone); load it with --dtype fp32'}")
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
        mix = self._request.mix
        return ScoredRow(mix.mix, tuple(self._logprobs), tuple(self._kl), tuple(self._ranks), tuple(self._top), mix.activations)

    def _chance(self, number: int, logprob: float) -> TokenChance:
        if number not in self._texts:
            self._texts[number] = self._request.vocabulary.tokenizer.token_text([number])[0]
        return TokenChance(number, self._texts[number], logprob)


def add_distances(rows: Sequence[ScoreRow], logits: Sequence[Tensor], at: int, vocab: int) -> None:
    """A piece of the text for all rows: logits [n, vocab] of each before the tokens from `at` on, and KL(first || row), nats.

    KL is over the first `vocab` tokens, the base's: what an adapter adds has no counterpart in another mix.
    """
    first = rows[0].add(logits[0], at)
    p = _of_base(first, vocab)
    weights = p.exp()
    rows[0].add_kl([0.0] * len(p))
    for row, own in zip(rows[1:], logits[1:], strict=True):
        q = _of_base(row.add(own, at), vocab)
        row.add_kl((weights * (p - q)).sum(-1).clamp_min(0).tolist())


def _of_base(logprobs: Tensor, vocab: int) -> Tensor:
    """The same without tokens beyond `vocab`, their share given to the others."""
    return logprobs if logprobs.shape[-1] == vocab else torch.log_softmax(logprobs[:, :vocab], -1)

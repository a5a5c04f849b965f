"""What a text is worth under several mixes."""
from __future__ import annotations

from .words import Mix, Struct


class TokenChance(Struct):
    id: int
    text: str
    """untrusted, as the tokenizer writes it"""
    logprob: float


class ScoredRow(Struct):
    """One mix; every tuple has one entry for each token of the reply."""

    mix: Mix
    logprobs: tuple[float, ...]
    """natural logarithm, of the token that stands there"""
    kl: tuple[float, ...]
    """nats, KL(first mix || this one) over the whole vocabulary before that token; zeros for the first"""
    ranks: tuple[int, ...]
    """of the token that stands there: 1 is the likeliest"""
    top: tuple[tuple[TokenChance, ...], ...]


class Scored(Struct):
    score_id: int
    tokens: tuple[TokenChance, ...]
    """of the reply, with the log-probability under the first mix"""
    rows: tuple[ScoredRow, ...]
    notes: tuple[str, ...] = ()
    """what a reader of the figures must know, a clause each"""


class ScoreFailed(Struct):
    score_id: int
    message: str
    out_of_memory: bool = False
    cancelled: bool = False


class Tokenized(Struct):
    ask_id: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    found: bool = False
    start: int = -1
    """of the last exact occurrence in the prompt"""
    detail: str = ""
    """when it is not found: the nearest miss; or why the text cannot be an invocation"""

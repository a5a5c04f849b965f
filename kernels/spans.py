"""What attention is told of a step: whose rows stand where, and what is done to the scores."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one request in a step, and where its keys and values lie."""

    start: int
    """its first row in the step"""
    rows: int
    length: int
    """tokens in the cache, the rows of this step included; they are the last `rows` of them"""
    runs: tuple[tuple[int, int], ...]
    """(first block, blocks) of consecutive runs that hold the `length` tokens, in their order"""


@dataclass(frozen=True, slots=True)
class Scores:
    """What is done to the products of queries and keys before the softmax."""

    scale: float | None = None
    """None for 1 / sqrt(d)"""
    softcap: float = 0.0
    """c of c tanh(score / c), 0 for none"""


PLAIN = Scores()

"""One prompt through several mixes, as plain data: the replies, what is told of them, and which adapter moved a token."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..engine.protocol import (
    Activation,
    AdapterInfo,
    AdapterUse,
    CacheUse,
    Mix,
    ModelInfo,
    Prompt,
    RequestStats,
    Sampling,
    Scored,
    ScoredRow,
)
from .mixboard import scale_text

LABELS = "ABCD"


@dataclass(frozen=True)
class Column:
    label: str
    mix: Mix


@dataclass(frozen=True)
class Setup:
    """What all prompts of a comparison share: enough to repeat it."""

    model: ModelInfo
    adapters: tuple[AdapterInfo, ...]
    columns: tuple[Column, ...]
    """the first is what the others are compared with"""
    sampling: Sampling


@dataclass(frozen=True)
class Reply:
    """What one column answered; without `reason` it has not ended, with `failed` there is none."""

    text: str = ""
    ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    """the text that came with each token, "" where a character was not whole yet"""
    reason: str = ""
    stats: RequestStats | None = None
    activations: tuple[Activation, ...] = ()
    cache: CacheUse | None = None
    failed: str = ""


@dataclass(frozen=True)
class Round:
    """One prompt. `scored` reads the first column's reply under every column's mix, in their order, and then under others perhaps."""

    prompt: Prompt
    replies: tuple[Reply, ...]
    """by column"""
    scored: Scored | None = None
    score_failed: str = ""


class Divergence(NamedTuple):
    """Where two replies part. An id is None where a reply has ended."""

    token: int
    first: int | None
    second: int | None


class Distance(NamedTuple):
    """Of one mix from the first, over the tokens of the text that both read. KL in nats."""

    mean_kl: float
    max_kl: float
    max_at: int
    """index of the token before which it is largest"""
    same: float
    """share of tokens before which both think the same one likeliest"""


class Moved(NamedTuple):
    """What one adapter of a mix did to the log-probability of a token: that with it less that without it, the others as they are."""

    adapter: str
    nats: float


def first_divergence(first: Sequence[int], second: Sequence[int]) -> Divergence | None:
    """The first token in which two replies differ; None when they are the same."""
    shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    if shared == len(first) == len(second):
        return None
    return Divergence(shared, *(ids[shared] if shared < len(ids) else None for ids in (first, second)))


def agreement(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of places, of the longer reply, that hold the same token in both; 1 for two empty ones."""
    longest = max(len(first), len(second))
    return sum(a == b for a, b in zip(first, second, strict=False)) / longest if longest else 1.0


def token_text(round: Round, column: int, index: int) -> str:
    """The text of a token of a reply, as well as it is known: untrusted."""
    reply, scored = round.replies[column], round.scored
    number = reply.ids[index]
    if scored is not None and index < len(scored.tokens):
        seen = [scored.tokens[index], *(scored.rows[column].top[index] if column < len(scored.rows) else ())]
        if text := next((chance.text for chance in seen if chance.id == number), ""):
            return text
    return (reply.pieces[index] if index < len(reply.pieces) else "") or f"<{number}>"


def distance(scored: Scored, row: int) -> Distance | None:
    """How far the mix of `row` is from the first; None for a text without tokens."""
    first, other = scored.rows[0], scored.rows[row]
    if not other.kl:
        return None
    at = max(range(len(other.kl)), key=other.kl.__getitem__)
    same = sum(a[0].id == b[0].id for a, b in zip(first.top, other.top, strict=True) if a and b)
    return Distance(sum(other.kl) / len(other.kl), other.kl[at], at, same / len(other.kl))


def furthest_token(scored: Scored, rows: int) -> int:
    """Index of the token before which the largest KL of the first `rows` rows is; 0 when none is above zero."""
    found = [one for row in range(1, rows) if (one := distance(scored, row)) is not None]
    return max(found, key=lambda one: one.max_kl).max_at if found else 0


# -- leave one out -----------------------------------------------------------------------------------
def mixes_without(mix: Mix) -> tuple[tuple[str, Mix], ...]:
    """(adapter, the mix without it) for every adapter that acts in `mix`."""
    return tuple((use.name, tuple(other for other in mix if other is not use)) for use in mix if use.scale != 0)


def mixes_to_score(columns: Sequence[Column]) -> tuple[Mix, ...]:
    """The mixes of the columns, in their order; then each with one adapter left out, where no other is the same."""
    own = tuple(column.mix for column in columns)
    return own + tuple(dict.fromkeys(without for mix in own for _, without in mixes_without(mix) if without not in own))


def attribution(scored: Scored, mix: Mix, token: int) -> tuple[Moved, ...]:
    """What each adapter of `mix` did to the token at `token`, the strongest first; those that were not left out in `scored` are missing."""
    whole = _row(scored, mix)
    if whole is None:
        return ()
    found = []
    for name, without in mixes_without(mix):
        if (row := _row(scored, without)) is not None:
            found.append(Moved(name, whole.logprobs[token] - row.logprobs[token]))
    return tuple(sorted(found, key=lambda moved: -abs(moved.nats)))


def _row(scored: Scored, mix: Mix) -> ScoredRow | None:
    return next((row for row in scored.rows if row.mix == mix), None)


# -- sweep -------------------------------------------------------------------------------------------
def sweep_columns(adapter: str, scales: Sequence[float], others: Mix = ()) -> tuple[Column, ...]:
    """A column for each scale of `adapter`, `others` as they are beside it.

    The first is always scale 0, which the rest are compared with.
    """
    turned = (Column(scale_text(scale), (AdapterUse(adapter, scale), *others)) for scale in sorted(set(scales)) if scale != 0)
    return Column(scale_text(0.0), tuple(others)), *turned


def by_scale(columns: Sequence[Column]) -> list[int]:
    """Indices of the columns of a sweep, from the lowest scale to the highest."""
    return sorted(range(len(columns)), key=lambda i: columns[i].mix[0].scale if i else 0.0)

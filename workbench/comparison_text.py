"""What is told of a comparison, in lines: where the replies part, how far the mixes are apart, which adapter did it."""
from __future__ import annotations

from .comparison import (
    Round,
    Setup,
    agreement,
    attribution,
    distance,
    first_divergence,
    furthest_token,
    token_text,
)
from .text import clean_line


def numbers(setup: Setup, round: Round) -> list[str]:
    """What is told of the replies beside the first one, a line each; cleaned, without markup."""
    first, lines = round.replies[0], []
    for i, (column, reply) in enumerate(zip(setup.columns, round.replies, strict=True)):
        if i and not first.failed and not reply.failed:
            lines.append(f"{setup.columns[0].label}–{column.label}: {_divergence(round, i)}")
        if i and round.scored is not None and (far := distance(round.scored, i)) is not None:
            lines.append(f"KL({setup.columns[0].label}‖{column.label}) on {setup.columns[0].label}'s text: mean {nats(far.mean_kl)}, max "
                         f"{nats(far.max_kl)} nats at token {far.max_at} {_quoted(round.scored.tokens[far.max_at].text)}; "
                         f"same likeliest token at {far.same:.0%}")
    return [*lines, *_attributions(setup, round)]


def _divergence(round: Round, column: int) -> str:
    first, other = round.replies[0], round.replies[column]
    parts = first_divergence(first.ids, other.ids)
    if parts is None:
        return "the same tokens"
    texts = [_quoted(token_text(round, i, parts.token)) if number is not None else "its end"
             for i, number in ((0, parts.first), (column, parts.second))]
    return f"first difference at token {parts.token}, {texts[0]} and {texts[1]}; {agreement(first.ids, other.ids):.0%} of the tokens equal"


def _attributions(setup: Setup, round: Round) -> list[str]:
    """Which adapter moved the token where the columns are furthest apart."""
    scored = round.scored
    if scored is None or not scored.tokens:
        return []
    at, lines = furthest_token(scored, len(setup.columns)), []
    for column in setup.columns:
        if moved := attribution(scored, column.mix, at):
            shares = ", ".join(f"{clean_line(one.adapter, 60)} {one.nats:+.2f}" for one in moved)
            lines.append(f"{column.label}, token {at} {_quoted(scored.tokens[at].text)}, log-probability by adapter (the rest as it is): "
                         f"{shares}")
    return lines


def nats(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0005 or value == 0 else f"{value:.0e}"


def _quoted(text: str) -> str:
    return repr(clean_line(text, 40))

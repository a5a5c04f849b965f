"""What is told of a comparison, in lines: where the replies part, how far the mixes are apart, which adapter did it."""
from __future__ import annotations

from collections.abc import Sequence

from ..engine.protocol import Scored
from .comparison import (
    Distance,
    Reply,
    Round,
    Setup,
    agreement,
    attribution,
    distance,
    first_divergence,
    furthest_token,
    token_text,
)
from .mixboard import mix_text
from .prompt_text import prompt_line
from .text import clean, clean_line, counted

NOTHING = "(nothing)"
"""in place of a reply without a text"""


def round_text(setup: Setup, round: Round, number: int, of: int) -> str:
    """All of one prompt for a person: replies, then what is told of them."""
    lines = heading(round, number, of)
    for column, reply in zip(setup.columns, round.replies, strict=True):
        lines += [*reply_lines(f"{column.label}  {clean_line(mix_text(column.mix))}", reply), ""]
    return "\n".join([*lines, *(f"  {line}" for line in numbers(setup, round)), "", ""])


def reply_lines(name: str, reply: Reply) -> list[str]:
    """Whose it is and how it ended, then what it says, or why there is none."""
    end = "failed" if reply.failed else f"{counted(len(reply.ids), 'token')} · {reply.reason}"
    said = clean(reply.failed or reply.text or NOTHING)
    return [f"{name} · {end}", *(f"  {line}" for line in said.split("\n"))]


def heading(round: Round, number: int, of: int) -> list[str]:
    return [f"prompt {number} of {of}: {prompt_line(round.prompt)}", ""] if of > 1 else []


def suite_lines(setup: Setup, rounds: Sequence[Round]) -> list[str]:
    """Every column beside the first, over all prompts; nothing for a single one."""
    lines = []
    for i, column in list(enumerate(setup.columns))[1:] if len(rounds) > 1 else ():
        pairs = [(round.replies[0], round.replies[i]) for round in rounds]
        answered = [(first.ids, other.ids) for first, other in pairs if not first.failed and not other.failed]
        same = sum(first == other for first, other in answered)
        far = mean_distance([round.scored for round in rounds if round.scored is not None], i)
        kl = f"; KL mean {nats(far.mean_kl)}, max {nats(far.max_kl)} nats; same likeliest token at {far.same:.0%}" if far else ""
        lines.append(f"{setup.columns[0].label}–{column.label}: {same} of {len(answered)} replies the same{kl}")
    return lines


def mean_distance(scored: Sequence[Scored], row: int) -> Distance | None:
    """`distance` over all tokens of several texts; `max_at` is a token of the text where it is largest."""
    found = [(len(one.tokens), far) for one in scored if (far := distance(one, row)) is not None]
    if not found:
        return None
    tokens, top = sum(count for count, _ in found), max((far for _, far in found), key=lambda far: far.max_kl)
    return Distance(sum(count * far.mean_kl for count, far in found) / tokens, top.max_kl, top.max_at,
                    sum(count * far.same for count, far in found) / tokens)


def numbers(setup: Setup, round: Round) -> list[str]:
    """What is told of the replies beside the first one, a line each; cleaned, without markup."""
    first, lines = round.replies[0], []
    for i, (column, reply) in enumerate(zip(setup.columns, round.replies, strict=True)):
        if i and not first.failed and not reply.failed:
            lines.append(f"{setup.columns[0].label}–{column.label}: {_divergence(round, i)}")
        if i and round.scored is not None and (far := distance(round.scored, i)) is not None:
            where = f"KL({setup.columns[0].label}‖{column.label}) on {setup.columns[0].label}'s text: "
            lines.append(where + ("0 at every token" if far.max_kl == 0 else
                                  f"mean {nats(far.mean_kl)}, max {nats(far.max_kl)} nats at token {far.max_at} "
                                  f"{_quoted(round.scored.tokens[far.max_at].text)}; same likeliest token at {far.same:.0%}"))
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

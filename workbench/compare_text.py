"""What the compare screen says: the lines of a column, the figures of a run, one token under two mixes. All of it is cleaned here."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import exp, isfinite

from msgspec import structs
from rich.cells import set_cell_size
from textual.content import Content, Span

from ..engine.protocol import Activation, AdapterInfo, Mix, Scored, TokenChance
from .charts import folded, sparkline
from .compare_state import Run
from .comparison import Round, Setup, attribution
from .comparison_row import Row
from .comparison_text import nats, numbers
from .mixboard import mix_text
from .reload_text import SHOWN_DIGEST
from .styles import QUIET
from .text import clean_line
from .transcript import Item, Notice
from .votes import Tally, wilson
from .word_diff import Change, word_changes

CHANGED = "underline $text-warning"
HERE = "reverse bold underline $text-warning"
LIVE_DIFF_CHARACTERS = 4000
"""of a text that is still written; a longer one is compared when it is finished"""
_REASONS = {"length": "max_tokens reached", "context": "the context is full", "memory": "KV memory is full", "aborted": "stopped",
            "stop": "ended"}


@lru_cache(maxsize=16)
def changes(first: str, second: str) -> tuple[Change, ...]:
    """Where two cleaned texts differ by words."""
    return word_changes(first, second)


def marked(text: str, spans: Sequence[tuple[int, int]], here: int = -1) -> Content:
    """A cleaned text with spans of it marked, the one at index `here` more than the others. Where words are missing the blank is marked."""
    styled = []
    for index, (start, end) in enumerate(spans):
        if start == end:
            start, end = (start - 1, end) if start else (start, end + 1)
        styled.append(Span(start, min(end, len(text)), HERE if index == here else CHANGED))
    return Content(text, spans=styled)


def row_lines(row: Row, named: bool = True) -> list[Content]:
    """State or figures of a row, then its aLoRAs; without what tells whose it is when it has no name."""
    bad = row.phase in ("failed", "lost")
    parts = {
        "queued": f"waits: {row.note}" if row.note else "waits",
        "running": f"{row.tokens} tok …",
        "failed": f"✗ {row.note}", "lost": f"✗ cut off: {row.note}",
        "done": _figures(row, named),
    }
    lines = [Content.assemble((clean_line(parts[row.phase], 300), "$text-error" if bad else QUIET))]
    if named:
        lines += [Content.assemble((clean_line(_activation(each), 300), QUIET if each.found else "$text-warning"))
                  for each in row.activations]
    return lines


def _figures(row: Row, named: bool) -> str:
    parts = [f"{row.tokens} tok"] if row.text.strip() else [f"{row.tokens} tok", "no text"]
    if named and row.cache and row.cache.hit_tokens:
        parts.append(f"prefix {row.cache.hit_tokens}/{row.cache.prompt_tokens} reused")
    return " · ".join([*parts, row.note or _REASONS.get(row.reason, row.reason)])


def _activation(activation: Activation) -> str:
    if activation.found:
        return f"⚑ {activation.adapter} acts from token {activation.start} · {activation.detail}"
    return f"⚑ {activation.adapter} did not act: v ends the prompt with its invocation · {activation.detail}"


def pair_of(run: Run, other: int) -> tuple[Setup, Round]:
    """Of a run its first column and the one at index `other`, without what was left out of their mixes."""
    setup = replace(run.setup, columns=(run.setup.columns[0], run.setup.columns[other]))
    round, scored = run.round, run.scored
    if scored is not None:
        scored = structs.replace(scored, rows=(scored.rows[0], scored.rows[other]))
    return setup, replace(round, replies=(round.replies[0], round.replies[other]), scored=scored)


def run_lines(run: Run, width: int, other: int | None = None) -> list[Content]:
    """The figures of a run, of its first column and that at index `other` alone where one is given: where the replies part, how far the
    mixes are apart, token by token, and why there are none."""
    if run.active:
        return [Content.assemble(("the figures come when all replies are there", QUIET))]
    setup, round = pair_of(run, other) if other else (run.setup, run.round)
    lines = [Content(line) for line in numbers(setup, round)]
    if run.scored is not None and round.scored is not None:
        first = setup.columns[0].label
        for column, scored in list(zip(setup.columns, round.scored.rows, strict=False))[1:]:
            name = f"KL({first}‖{column.label}) by token "
            kl = [one if isfinite(one) else 0.0 for one in scored.kl]
            lines.append(Content.assemble(name, (sparkline(folded(kl, width - len(name)), width - len(name)), "$accent")))
        lines += [Content.assemble((f"! {clean_line(note, 300)}", "$text-warning")) for note in run.scored.notes]
    elif run.score_failed:
        lines.append(Content.assemble((f"✗ no figures: {clean_line(run.score_failed, 400)}", "$text-error")))
    elif run.scoring:
        lines.append(Content.assemble(("KL is being computed …", QUIET)))
    return lines


def votes_line(tally: Tally | None, labels: tuple[str, str]) -> str:
    """`votes A 7 · B 3 · tie 2 · both bad 1 · A wins 70% [40–89%]`: of the votes for one of them, with Wilson's 95 % interval."""
    if tally is None or not tally.total:
        return "no blind votes between these yet: b"
    first, second = labels
    text = f"votes {first} {tally.first} · {second} {tally.second} · tie {tally.tie} · both bad {tally.bad}"
    decided = tally.first + tally.second
    if not decided:
        return text
    low, high = wilson(tally.first, decided)
    return f"{text} · {first} wins {tally.first / decided:.0%} [{low:.0%}–{high:.0%}] of {decided}"


def stale_marks(run: Run, adapters: dict[str, AdapterInfo]) -> dict[str, str]:
    """Short digests of the adapters of a run whose names mean other content now."""
    return {name: digest[:SHOWN_DIGEST] for name, digest in run.contents(adapters).items()}


# -- one token ---------------------------------------------------------------------------------------
def token_lines(run: Run, other: int, at: int, width: int) -> list[Content]:
    """The token at `at` of the first reply, under the first mix and under that of column `other`."""
    scored = run.scored
    if scored is None:
        return run_lines(run, width)
    labels = [run.setup.columns[i].label for i in (0, other)]
    rows, token = [scored.rows[i] for i in (0, other)], scored.tokens[at]
    lines = [Content.assemble((f"token {at} of {len(scored.tokens)}  ", QUIET), (_text(token), "bold"),
                              f"   KL({labels[0]}‖{labels[1]}) {nats(rows[1].kl[at])} nats   "
                              f"Δ logprob {rows[0].logprobs[at] - rows[1].logprobs[at]:+.2f}")]
    half = max((width - 2) // 2, 20)
    heads = [f"{label}  {exp(row.logprobs[at]):.1%}, logprob {row.logprobs[at]:.2f}, rank {row.ranks[at]:,}"
             for label, row in zip(labels, rows, strict=True)]
    lines.append(Content.assemble((_cell(heads[0], half) + "  " + _cell(heads[1], half), "bold $accent")))
    tops = [row.top[at] for row in rows]
    for place in range(max(map(len, tops))):
        cells = [_cell(_chance(top[place], token) if place < len(top) else "", half) for top in tops]
        lines.append(Content("  ".join(cells)))
    return [*lines, *_moved(run, scored, (0, other), at)]


def _moved(run: Run, scored: Scored, columns: Sequence[int], at: int) -> list[Content]:
    """Which adapter moved the token: the log-probability with it less that without it, the rest of its mix as it is."""
    lines = []
    for column in (run.setup.columns[i] for i in columns):
        moved = attribution(scored, column.mix, at)
        if moved:
            shares = ", ".join(f"{clean_line(one.adapter, 40)} {one.nats:+.2f}" for one in moved)
            lines.append(Content(f"{column.label}: with it less without it, in nats: {shares}"))
    return lines


def _chance(chance: TokenChance, token: TokenChance) -> str:
    return f"{'▸' if chance.id == token.id else ' '} {exp(chance.logprob):6.1%} {_text(chance)}"


def _text(chance: TokenChance) -> str:
    return repr(clean_line(chance.text, 40)) if chance.text else f"<{chance.id}>"


def _cell(text: str, width: int) -> str:
    return set_cell_size(text, width)


def mix_line(label: str, mix: Mix, contents: Mapping[str, str] = {}) -> str:  # noqa: B006
    """`A  pirate ×0.75 + json ×0.30`."""
    return clean_line(f"{label}  {mix_text(mix, contents)}", 300)


def gone_text(items: Sequence[Item]) -> str:
    """Why the engine is gone, as its card in the chat says it, and what to do."""
    cause = next((item.text for item in reversed(items) if isinstance(item, Notice) and item.kind == "engine"), "the engine is gone")
    return f"✗ {clean_line(cause, 200)} · Ctrl+E starts it again"

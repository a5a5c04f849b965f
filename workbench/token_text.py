"""Tokens as people can tell them apart, and where an invocation stands."""
from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from ..engine.protocol import Activation
from .styles import QUIET
from .text import clean, clean_line

MOST_TOKENS = 48
AROUND = 28
"""characters shown before and behind an invocation"""
SPAN = "bold underline $accent"
BORDER = ("│", QUIET)


def tokens_content(texts: Sequence[str]) -> Content:
    """`‹<|im_start|>│cert│ainty│⏎›`: every token underlined, borders between them."""
    parts: list[tuple[str, str]] = []
    for text in texts[:MOST_TOKENS]:
        parts += [BORDER, (clean_line(text, 40) or "∅", SPAN)]
    more = [(f" and {len(texts) - MOST_TOKENS} more", QUIET)] if len(texts) > MOST_TOKENS else []
    return Content.assemble(("‹", QUIET), *parts[1:], *more, ("›", QUIET))


def span_content(activation: Activation) -> Content:
    """The invocation token by token, with what stands around it in the prompt."""
    before, after = clean_line(activation.before, 400)[-AROUND:], clean_line(activation.after, AROUND)
    return Content.assemble((f"…{before}" if before else "", QUIET), tokens_content(activation.tokens), (after, QUIET))


def marked(asked: str, activations: Sequence[Activation]) -> Content:
    """What the person said, cleaned; an invocation that was found in it is marked and shown as tokens."""
    spans = sorted(span for activation in activations if (span := _span_in(asked, activation)))
    parts: list[Content] = []
    at = 0
    for start, end, tokens in spans:
        if start >= at:
            parts += [Content(clean(asked[at:start])), Content.assemble(("⚑", "$accent"), tokens_content(tokens))]
            at = end
    return Content("").join([*parts, Content(clean(asked[at:]))])


def _span_in(asked: str, activation: Activation) -> tuple[int, int, tuple[str, ...]] | None:
    """Where in `asked` the invocation stands, if it is there that it was found: what follows it must be what follows there."""
    text = "".join(activation.tokens)
    start = asked.rfind(text) if activation.found and text else -1
    if start < 0:
        return None
    rest, after = asked[start + len(text):].rstrip(), activation.after.lstrip()
    return (start, start + len(text), activation.tokens) if _agree(rest.lstrip(), after) else None


def _agree(rest: str, after: str) -> bool:
    """Whether one begins with the other: the prompt goes on behind the message, and what is told of it is cut."""
    short = min(len(rest), len(after))
    return rest[:short] == after[:short]

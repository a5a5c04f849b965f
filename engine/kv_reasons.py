"""Why a block was not found, in words."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from .blocks import BLOCK_TOKENS
from .kv_index import Filled
from .kv_keys import ID_BYTES, History, Timeline, same_beginning
from .protocol.kv import MissKind
from .stretches import Acting

SHOWN = 3
"""differences between two mixes that are told; of more, how many"""


@dataclass(frozen=True, slots=True)
class Missed:
    """The block that was looked for: `ids` (packed, of a whole block or of the prompt's end) after `before` tokens; `had` of them were
    found."""

    ids: bytes
    before: int
    had: int
    timeline: Timeline

    @property
    def history(self) -> History:
        """Of the tokens up to the first one that was not found."""
        return self.timeline.at(self.before + self.had + 1)


def reason(missed: Missed, alike: Iterable[Filled], now: float) -> tuple[MissKind, str]:
    """Why `missed` is not there. `alike`: what followed the same tokens, the latest first (KvIndex.alike).

    Something explains it when its tokens are those looked for, all of them or all it has, beyond what was found. If they were computed
    under the same mixes, then it is gone; else the one that differs in the fewest adapters tells.
    """
    wanted = len(missed.ids) // ID_BYTES
    nearest: tuple[float, MissKind, str, int] | None = None
    for filled in alike:
        same = same_beginning(filled.ids, missed.ids)
        if same <= missed.had or same < min(wanted, filled.tokens):
            continue
        then = filled.history.at(missed.before + missed.had + 1)
        if then.key == missed.history.key and filled.gone is not None:
            return filled.gone.kind, f"{filled.gone.kind} {ago(now - filled.gone.when)}{filled.gone.because}"
        difference = _difference(then, missed.history)
        if nearest is None or difference[0] < nearest[0]:
            nearest = difference
    _, kind, text, first = nearest or (0, "new tokens", "", 0)
    beginning = _beginning(missed)
    if first and not beginning:
        text += f", from token {first} on"
    return kind, "; ".join(filter(None, (text, beginning)))


def ago(seconds: float) -> str:
    """How long ago, to one unit: `12 s ago`."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago" if seconds >= 1 else "just now"


def differences(then: Sequence[Acting], now: Sequence[Acting]) -> tuple[list[str], bool]:
    """What acts otherwise now, a clause for each adapter; and whether the content of one is another under the same name."""
    gone, come = list(then), []
    for use in now:
        same = next((old for old in gone if (old.digest, old.scale) == (use.digest, use.scale)), None)
        if same is None:
            come.append(use)
        else:
            gone.remove(same)
    clauses, content = [], False
    for use in list(come):
        old = next((old for old in gone if old.digest == use.digest), None) or next((old for old in gone if old.name == use.name), None)
        if old is None:
            continue
        gone.remove(old)
        come.remove(use)
        if old.digest != use.digest:
            content = True
            clauses.append(f"content of {use.name} changed (digest {_short(old, use)}… then, {_short(use, old)}… now)")
        if old.scale != use.scale:
            write = "{:g}".format if f"{old.scale:g}" != f"{use.scale:g}" else repr
            clauses.append(f"{use.name} x {write(old.scale)} then, x {write(use.scale)} now")
    clauses += [f"{old.name} acted then, not now" for old in gone] + [f"{use.name} acts now, not then" for use in come]
    if not clauses:
        clauses = [f"the order was {', '.join(old.name for old in then)} then, {', '.join(use.name for use in now)} now"]
    return clauses, content


def _difference(then: History, now: History) -> tuple[float, MissKind, str, int]:
    """At the first token that the two differ in: (adapters that differ, kind, words, that token). Other positions are farther than any
    mix."""
    old, new = then.steps(), now.steps()
    if old[0].key != new[0].key:
        return inf, "positions differ", "computed for a request of another length, whose positions are turned by other RoPE factors", 0
    same = 0
    while same < min(len(old), len(new)) and old[same].key == new[same].key:
        same += 1
    starts = [steps[same].start for steps in (old, new) if same < len(steps)]
    first = min(starts)
    clauses, content = differences(then.at(first + 1).acting, now.at(first + 1).acting)
    text = ", ".join(clauses[:SHOWN]) + (f" and {len(clauses) - SHOWN} more" if len(clauses) > SHOWN else "")
    return len(clauses), "content changed" if content else "mix differs", text, first


def _beginning(missed: Missed) -> str:
    """That an adapter begins to act inside the block, which is then shared by nobody under whom it does not."""
    history: History | None = missed.timeline.at(missed.before + BLOCK_TOKENS)
    while history is not None and history.before is not None and history.start > missed.before:
        come = {each.name for each in history.acting} - {each.name for each in history.before.acting}
        if come:
            return f"{', '.join(sorted(come))} begins to act inside this block, at token {history.start}"
        history = history.before
    return ""


def _short(a: Acting, b: Acting) -> str:
    """The digest of `a`, as many characters as tell it from that of `b`."""
    length = 4
    while a.digest[:length] == b.digest[:length] and length < len(a.digest):
        length += 4
    return a.digest[:length]

"""Why a block was not found, in words."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from .kv_index import Filled
from .kv_keys import ID_BYTES, History, Timeline, same_beginning
from .protocol.kv import MissKind
from .stretches import Acting

SHOWN = 3
"""differences between two mixes that are told; of more, how many"""


@dataclass(frozen=True, slots=True)
class Reason:
    kind: MissKind
    text: str = ""
    """in one clause; of what is gone, what follows the time"""
    when: float = 0.0
    """of what is gone, by the memory's clock"""


NEW = Reason("new tokens")
NO_ROOM = Reason("no room", "its beginning is there, but no block was free to copy it into")
BEHIND = Reason("behind a gap", "still there, but what comes before it is missing: a step that ends in front of it takes it over")


class Reasons:
    """Why blocks of a request are not there, of which `timeline` says what acts on its tokens."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._differences: dict[tuple[History, History], _Difference] = {}

    def of(self, ids: bytes, before: int, had: int, alike: Iterable[Filled]) -> tuple[Reason, Filled | None]:
        """Why the block with `ids` (packed, of a whole block or of the prompt's end) after `before` tokens is not there but for its first
        `had` tokens; and which of `alike`, that followed the same tokens (KvIndex.alike), tells so.

        Something explains it when its tokens are those looked for, all of them or all it has, beyond what was found. If they were computed
        under the same mixes, then it is gone or out of reach; else the one that differs in the fewest adapters tells.
        """
        wanted, now = len(ids) // ID_BYTES, self._timeline.at(before + had + 1)
        nearest: tuple[_Difference, Filled] | None = None
        for filled in alike:
            same = same_beginning(filled.ids, ids)
            if same <= had or same < min(wanted, filled.tokens):
                continue
            then = filled.history.at(before + had + 1)
            if then.key == now.key:
                return Reason(filled.gone.kind, filled.gone.because, filled.gone.when) if filled.gone else BEHIND, filled
            difference = self._difference(then, now)
            if nearest is None or difference.adapters < nearest[0].adapters:
                nearest = difference, filled
        if nearest is None:
            return NEW, None
        difference, teller = nearest
        if beginning := _beginning(self._timeline.at(before + wanted), before):
            return Reason(difference.reason.kind, f"{difference.reason.text}; {beginning}"), teller
        return difference.reason_and_place, teller

    def _difference(self, then: History, now: History) -> _Difference:
        pair = then, now
        if pair not in self._differences:
            self._differences[pair] = _difference(then, now)
        return self._differences[pair]


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


@dataclass(frozen=True, slots=True)
class _Difference:
    """Between what acted then and what acts now, at the first token that the two differ in."""

    adapters: float
    """that differ; other positions are farther than any mix"""
    reason: Reason
    reason_and_place: Reason
    """the same with that token"""


def _difference(then: History, now: History) -> _Difference:
    old, new = then.steps(), now.steps()
    if old[0].key != new[0].key:
        turned = Reason("positions differ", "computed for a request of another length, whose positions are turned by other RoPE factors")
        return _Difference(inf, turned, turned)
    same = 0
    while same < min(len(old), len(new)) and old[same].key == new[same].key:
        same += 1
    starts = [steps[same].start for steps in (old, new) if same < len(steps)]
    first = min(starts)
    clauses, content = differences(then.at(first + 1).acting, now.at(first + 1).acting)
    text = ", ".join(clauses[:SHOWN]) + (f" and {len(clauses) - SHOWN} more" if len(clauses) > SHOWN else "")
    kind: MissKind = "content changed" if content else "mix differs"
    return _Difference(len(clauses), Reason(kind, text), Reason(kind, f"{text}, from token {first} on" if first else text))


def _beginning(acts: History, before: int) -> str:
    """That an adapter begins to act inside the block after `before` tokens, which is then shared by nobody under whom it does not. `acts`:
    up to the end of that block."""
    history: History | None = acts
    while history is not None and history.before is not None and history.start > before:
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

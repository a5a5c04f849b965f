"""What a change of the mix does to a reply that is being written, in words."""
from __future__ import annotations

from ..engine.protocol import MixChange
from .mixboard import mix_text
from .text import counted
from .transcript import Splice

CHANGES: tuple[MixChange, ...] = ("splice", "recompute", "finish")
_MEANS = {
    "splice": "acts from its next token; what was computed before stays as it is",
    "recompute": "has prompt and reply so far computed again under the new mix; then the reply goes on",
    "finish": "waits: the reply ends under the mix that it has",
}


def change_text(change: MixChange) -> str:
    """The setting as a sentence."""
    return f"{change}: a change of the mix in a reply {_MEANS[change]}"


def splice_text(splice: Splice) -> str:
    """A change as the line at its place in the reply; names are not cleaned."""
    if splice.change == "finish":
        return f"── at token {splice.token}: {mix_text(splice.after)} was set; this reply finishes under {mix_text(splice.before)} ──"
    change = f"from token {splice.token}: {mix_text(splice.before)} → {mix_text(splice.after)}"
    if splice.change == "recompute":
        if splice.recomputed is None:
            return f"── {change} · recomputed when it goes on ──"
        again = counted(splice.recomputed, "token") if splice.recomputed else "nothing, all of it was there"
        return f"── {change} · recomputed: {again} ──"
    return f"── {change} · spliced ──"

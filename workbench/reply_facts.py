"""How a reply was made, as the lines under it."""
from __future__ import annotations

from textual.content import Content

from .mixboard import mix_text
from .text import clean_line
from .transcript import Version

_REASONS = {"length": "max_tokens reached (/set max_tokens 1024)", "context": "the context is full (Ctrl+N starts anew)",
            "aborted": "stopped"}


def meter_lines(version: Version) -> list[Content]:
    """State or figures of a reply, then one line for each aLoRA of its mix."""
    style = "$text-error" if version.phase in ("failed", "lost") else "$foreground 60%"
    lines = [Content.assemble((clean_line(_figures(version), 600), style))]
    for activation in version.activations:
        mark = "" if activation.found else "$text-warning"
        if activation.found:
            text = f"⚑ {activation.adapter} acts from token {activation.start} · {activation.detail}"
        else:
            text = f"⚑ {activation.adapter} did not act: v on it in the adapter list lets it act on this chat · {activation.detail}"
        lines.append(Content.assemble((clean_line(text, 300), mark or "$foreground 60%")))
    return lines


def _figures(version: Version) -> str:
    if version.phase == "waiting":
        return version.note or "waits for the model"
    if version.phase == "queued":
        return f"waits: {version.note}" if version.note else "…"
    if version.phase == "running":
        return f"{version.tokens} tok · reading {version.prompt_tokens}" if not version.tokens else f"{version.tokens} tok …"
    if version.phase == "failed":
        return f"✗ {version.note} — Ctrl+R asks again"
    if version.phase == "lost":
        return f"✗ cut off: {version.note}"
    return _meter(version)


def _meter(version: Version) -> str:
    stats, parts = version.stats, []
    if stats:
        parts = [f"{stats.new_tokens} tok", f"{stats.decode_tokens_per_second:.1f} tok/s", f"TTFT {stats.ttft_ms / 1000:.2f} s",
                 "greedy" if version.sampling.temperature == 0 else f"seed {stats.seed}", mix_text(version.mix_now, version.marks)]
    if version.reason in _REASONS:
        parts.append(_REASONS[version.reason])
    return " · ".join(parts) or version.note

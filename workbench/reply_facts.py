"""How a reply was made, as the lines under it."""
from __future__ import annotations

from textual.content import Content

from ..engine.protocol import Activation
from .cache_text import prefix_text
from .mixboard import mix_text
from .styles import QUIET
from .text import clean_line, counted
from .token_text import span_content
from .transcript import Version

_REASONS = {"length": "max_tokens reached (/set max_tokens 1024)", "context": "the context is full (Ctrl+N starts anew)",
            "memory": "KV memory is full", "aborted": "stopped"}


def meter_lines(version: Version) -> list[Content]:
    """State or figures of a reply, then one line for each aLoRA of its mix."""
    style = "$text-error" if version.phase in ("failed", "lost") else QUIET
    lines = [Content.assemble((clean_line(_figures(version), 600), style))]
    return lines + [_activation(activation, version) for activation in version.activations]


def _activation(activation: Activation, version: Version) -> Content:
    """Where an aLoRA acts, the place as tokens, and what of the tokens before it was there already; or why it does not act."""
    if not activation.found:
        text = f"⚑ {activation.adapter} did not act: v on it in the adapter list lets it act on this chat · {activation.detail}"
        return Content.assemble((clean_line(text, 300), "$text-warning"))
    where = f"⚑ {activation.adapter} acts from token {activation.start}"
    if not activation.tokens:
        return Content.assemble((clean_line(f"{where} · {activation.detail}", 300), QUIET))
    fired = any(mark.adapter == activation.adapter for mark in version.fired)
    reused = f", {counted(version.cache.base_tokens, 'base token')} reused of {activation.start} before it" if version.cache else ""
    how = ", where the model wrote it" if fired else reused
    return Content.assemble((clean_line(f"{where}{how}: ", 200), QUIET), span_content(activation))


def _figures(version: Version) -> str:
    if version.phase == "waiting":
        return version.note or "waits for the model"
    if version.phase == "queued":
        said = f"{version.tokens} tok · " if version.tokens else ""
        return f"{said}waits: {version.note}" if version.note else "…"
    if version.phase == "running":
        reading = f"{version.tokens} tok · reading {version.prompt_tokens - (version.cache.hit_tokens if version.cache else 0)}"
        reused = f", {version.cache.hit_tokens} reused" if version.cache and version.cache.hit_tokens else ""
        speed = f" · {version.pace.speed:.0f} tok/s" if version.pace.speed else ""
        return f"{version.tokens} tok{speed} …" if version.tokens else reading + reused
    if version.phase == "failed":
        return f"✗ {version.note} — Ctrl+R asks again"
    if version.phase == "lost":
        return f"✗ cut off: {version.note}"
    return _meter(version)


def _meter(version: Version) -> str:
    stats, parts = version.stats, []
    if stats:
        parts = [f"{stats.new_tokens} tok", f"{stats.decode_tokens_per_second:.1f} tok/s", f"TTFT {stats.ttft_ms / 1000:.2f} s",
                 *_memory(version), "greedy" if version.sampling.temperature == 0 else f"seed {stats.seed}",
                 mix_text(version.mix_now, version.marks)]
    if stats and not version.text.strip():
        parts.insert(1, "no text")
    if version.reason in _REASONS:
        parts.append((version.reason == "memory" and version.note) or _REASONS[version.reason])
    return " · ".join(parts) or version.note


def _memory(version: Version) -> list[str]:
    """What of the prompt was there when the reply began, and when it went on after a pause."""
    parts = [prefix_text(version.cache)] if version.cache else []
    if version.preempted:
        again = f", then {prefix_text(version.again)}" if version.again and version.again.prompt_tokens else ""
        parts.append(f"paused {'once' if version.preempted == 1 else f'{version.preempted} times'} for KV memory{again}")
    return parts

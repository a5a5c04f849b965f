"""The facts of an adapter as lines: what it is, what of it acts here, and what the person set."""
from __future__ import annotations

from ..engine.protocol import AdapterInfo
from .charts import folded, sparkline
from .mixboard import scale_text
from .reload_text import file_line
from .state import BenchState
from .text import clean_line, counted, size_text


def fact_lines(state: BenchState, name: str, width: int) -> list[str]:
    """Lines for the details pane, cleaned, each at most a few times `width` long."""
    info = state.adapters.get(name)
    if info is None:
        return [clean_line(name, width), clean_line(state.failed.get(name, "being read …"), 600)]
    setting, view = state.board[name] if name in state.board else None, state.view(name)
    scale = setting.scale if setting else 1.0
    lines = [
        clean_line(info.name, width),
        f"{clean_line(info.format, 24)} · r{_many(info.ranks)} · {clean_line(info.dtype, 12)}{_kinds(info)}",
        _effective(info, scale),
        f"{info.matched}/{info.total} modules {'✓ all' if info.matched == info.total else '⚠ the rest does not act'}",
        " " + " ".join(f"{clean_line(kind, 24)}×{layers}" for kind, layers in list(info.targets.items())[:12]),
        f"{size_text(info.bytes)} · sha {clean_line(info.digest[:12])}",
        clean_line(f"for {info.base_model}", width) if info.base_model else "does not say for which base",
    ]
    if view and view.file:
        lines.insert(1, file_line(view.file))
    if info.dora and not scale:
        lines.append("at scale 0 it is off, the base itself; in PEFT scale 0 keeps the trained magnitudes")
    lines += _own(info)
    if info.invocation:  # high up: without it the adapter seems to do nothing
        ids = " ".join(map(str, info.invocation_tokens[:12]))
        lines[2:2] = ["acts only after its invocation: v invokes it on this chat, f changes it",
                      *(["also where the model itself writes it"] if info.invocation_in_reply else ()),
                      f"⚑ {clean_line(info.invocation, 80)} = {len(info.invocation_tokens)} tok: {ids}"]
    if info.norms:
        lines.append(f"{'‖BA‖' if info.dora else '‖ΔW‖'} {sparkline(folded(info.norms, max(width - 6, 8)), 200)}")
    if view:
        place = f"in {f'slot G{view.slot}' if view.tier == 'slot' else view.tier}"
        lines.append(f"{'being read from disk' if view.reading else place}{', pinned' if view.pinned else ''}")
    return lines + [f"! {clean_line(note, 300)}" for note in info.notes]


def _own(info: AdapterInfo) -> list[str]:
    """What it brings beside low-rank deltas, and what it wants."""
    whole = counted(len(info.replaced), "whole tensor") if info.replaced else ""
    rows = counted(sum(info.token_rows.values()), "trained row") if info.token_rows else ""
    added = counted(info.added_rows, "more token") if info.added_rows else ""
    brings = ", ".join(filter(None, (whole, rows, added)))
    return [line for line in (
        f"brings {brings}" if brings else "", f"task {clean_line(info.task, 60)}" if info.task else "",
        "expects a prompt prefix: i offers it" if info.prompt_prefix else "") if line]


def _kinds(info: AdapterInfo) -> str:
    kinds = {"rsLoRA": info.rslora, "DoRA": info.dora, "aLoRA": bool(info.invocation)}
    return "".join(f" · {kind}" for kind, there in kinds.items() if there)


def _effective(info: AdapterInfo, scale: float) -> str:
    if not info.effective_scales:
        return f"no low-rank delta · yours {scale_text(scale)}"
    own = " ".join(f"{value:g}" for value in info.effective_scales[:4])
    if len(info.effective_scales) == 1:
        return f"alpha/r {own} × yours {scale_text(scale)} = {info.effective_scales[0] * scale:.4g}"
    return f"alpha/r {own} (by module) × yours {scale_text(scale)}"


def _many(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}" if ranks else "?"

"""The engine's panels: slots and tiers, step times, events; KV memory is in `kv.py`. Each is one text made from the store."""
from __future__ import annotations

from collections.abc import Sequence

from rich.cells import set_cell_size
from textual.content import Content
from textual.widgets import Static

from ...engine.protocol import PagesView, SlotView
from ..cache_text import hit_text
from ..charts import folded, hbar, sparkline
from ..state import BenchState
from ..styles import QUIET
from ..text import clean_line, counted, size_text

Line = Content | str
LORA_OPS = ("shrink", "expand", "adapters")
"""what adapters add to a step"""


class Panel(Static):
    """A text that is redrawn only when it changed; the screen is laid out anew only when its height may have."""

    WRAPS = False

    def __init__(self, name: str) -> None:
        super().__init__("", id=f"panel-{name}", classes="panel", markup=False)
        self._shown: Content | None = None
        self._laid = 0, 0
        """columns, lines"""
        self.styles.text_wrap = "wrap" if self.WRAPS else "nowrap"

    def put(self, lines: list[Line]) -> None:
        content = Content("\n").join(line if isinstance(line, Content) else Content(line) for line in lines)
        if content != self._shown:
            laid = self.columns, content.get_height({}, self.columns) if self.WRAPS else len(lines)
            self.update(content, layout=laid != self._laid)
            self._shown, self._laid = content, laid

    @property
    def columns(self) -> int:
        return max(self.content_size.width, 20)


def title(text: str, rest: str = "") -> Content:
    """A panel's first line."""
    return Content.assemble((text, "bold $accent"), (f"  {rest}" if rest else "", QUIET))


class SlotsPanel(Panel):
    """Which adapter lies in which slot, how long unused, pinned, in use; the host tier; the last eviction."""

    WRAPS = True

    def show(self, state: BenchState) -> None:
        slots, host = state.snapshot.slots, state.snapshot.host
        used = sum(bool(slot.adapter) for slot in slots)
        lines: list[Line] = [title("SLOTS", f"{used}/{len(slots)}")]
        lines += [self._slot(slot, state.idle_seconds(slot)) for slot in slots] or [
            "the engine is gone" if state.engine == "gone" else "no model yet"]
        if state.snapshot.pages:
            lines.append(_pages(state.snapshot.pages))
        if host.limit_bytes:
            lines.append(f"host {len(host.adapters)} · {size_text(host.used_bytes)} of {size_text(host.limit_bytes)}")
            composed = f" · adapters joined {size_text(state.snapshot.composed_bytes)}" if state.snapshot.composed_bytes else ""
            lines.append(f"engine process {size_text(state.snapshot.memory_bytes)}{composed}")
        if last := state.last_eviction:
            lines.append(Content.assemble((clean_line(f"{last.at:%H:%M:%S} {last.text}", 160), QUIET)))
        self.put(lines)

    def _slot(self, slot: SlotView, idle: float) -> Content:
        if not slot.adapter:
            return Content.assemble((f"G{slot.slot} · free ·", QUIET))
        state = "in use" if slot.users else f"{_age(idle)} idle"
        pages = f"{slot.pages}p " if slot.pages else ""
        facts = f"r{slot.rank:<3} {size_text(slot.bytes):>8} {pages}{state}{' ▪' if slot.pinned else ''}"
        room = max(self.columns - len(facts) - 4, 6)
        return Content(f"G{slot.slot} {set_cell_size(clean_line(slot.adapter, room), room)} {facts}")


def _pages(kinds: Sequence[PagesView]) -> str:
    """How many pages of rank rows are taken, by kind of linear."""
    used = " · ".join(f"{clean_line(view.kind, 12).removesuffix('_proj').removeprefix('lm_')} {view.used}" for view in kinds)
    whole = size_text(sum(view.total * view.bytes for view in kinds))
    return f"pages (p) {used} of {kinds[0].total} each · {whole} in all"


def _age(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 100 else f"{seconds / 60:.0f}min" if seconds < 6000 else f"{seconds / 3600:.0f}h"


class StepsPanel(Panel):
    """The last step, its parts, and the history of step times."""

    def show(self, state: BenchState) -> None:
        last, p50, p95 = state.step_times()
        if not state.steps:
            self.put([title("STEP"), Content.assemble(("no step yet", QUIET))])
            return
        step = state.steps[-1]
        width = self.columns
        lines: list[Line] = [title("STEP", f"{_ms(last)} ms  p50 {_ms(p50)}  p95 {_ms(p95)}")]
        history = sparkline(folded([s.ms for s in state.steps], width), width)
        lines.append(Content.assemble((history, "$primary-lighten-2")))
        lines += [self._op(op, ms, step.ms, width - 27) for op, ms in step.ms_by_op.items()]
        many = f"{counted(step.requests, 'seq')} · {counted(step.adapters, 'adapter')}" + (f" · r≤{step.max_rank}" if step.adapters else "")
        lines.append(f"{many} · {step.prefill_tokens}+{step.decode_tokens} tok")
        if step.path:
            lines.append(Content.assemble((clean_line(step.path, width), QUIET)))
        self.put(lines)

    def _op(self, op: str, ms: float, total: float, width: int) -> Content:
        share = ms / total if total else 0.0
        style = "$accent" if op in LORA_OPS else "$primary-lighten-2"
        return Content.assemble(f"{op:<11} {ms:7.2f} ms {share:4.0%} ", (hbar(share, max(width, 4)), style))


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


class EventsPanel(Panel):
    """What happened and why, newest first."""

    WRAPS = True

    def show(self, state: BenchState) -> None:
        lines: list[Line] = [title("EVENTS")]
        for entry in list(state.events)[-60:][::-1]:
            mark = "✗ " if entry.bad else ""
            text = clean_line(f"{entry.at:%H:%M:%S} {mark}{entry.text}", 240)
            lines.append(Content.assemble((text, "$text-error" if entry.bad else "")))
        self.put(lines)


def status_line(state: BenchState, width: int) -> Content:
    """The right column in one line, for screens without room for it."""
    slots, kv = state.snapshot.slots, state.snapshot.kv
    used = sum(bool(slot.adapter) for slot in slots)
    share = kv.held / kv.blocks if kv.blocks else 0.0
    last, _, _ = state.step_times()
    lora = 0.0
    if state.steps and state.steps[-1].ms:
        lora = sum(state.steps[-1].ms_by_op.get(op, 0.0) for op in LORA_OPS) / state.steps[-1].ms
    memory = f"KV {share:.0%} hit {hit_text(kv.counters)}"
    left = f"slots {'■' * used}{'□' * (len(slots) - used)} {used}/{len(slots)} · {memory} · step {last:.0f} ms "
    right = f" · lora {lora:.0%}"
    room = max(width - 2 - len(left) - len(right), 0)
    return Content(f"{left}{sparkline([step.ms for step in state.steps], min(room, 24))}{right}"[:max(width - 2, 0)])

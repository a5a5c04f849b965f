"""One adapter at many scales: KL against scale, and the reply at each."""
from __future__ import annotations

from math import isfinite

from rich.cells import set_cell_size
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.geometry import Region
from textual.screen import Screen
from textual.widgets import Static

from ..charts import column_chart, hbar
from ..compare_files import export
from ..compare_state import Run
from ..compare_text import changes, gone_text, marked, row_lines
from ..comparison import Distance, by_scale, distance
from ..comparison_row import Row
from ..comparison_text import nats
from ..control import Control
from ..header import header_line
from ..keys import bindings
from ..mixboard import mix_text
from ..panels.engine import Panel, title
from ..styles import QUIET
from ..text import clean, clean_line, counted
from ..widgets.key_line import KeyLine
from .steady import SteadySize

CHART_HEIGHT = 8
BAR = 8


class SweepPanel(Panel):
    """The chart and a line for every scale."""

    def __init__(self) -> None:
        super().__init__("sweep")
        self.styles.text_overflow = "ellipsis"
        self._top = 0.0
        """the largest mean KL"""

    def show(self, run: Run, chosen: int, height: int) -> int:
        """Draw it; the line of the chosen scale."""
        order = by_scale(run.setup.columns)
        far = {i: distance(run.scored, i) if run.scored else None for i in order}
        self._top = max((one.mean_kl for one in far.values() if one and isfinite(one.mean_kl)), default=0.0)
        heading = title(f"SWEEP OF {clean_line(run.swept, 40)}", clean_line(f"“{run.asked}”", max(self.columns - 50, 20)))
        lines: list[Content | str] = [heading]
        if run.scored is not None:
            values = [one.mean_kl if (one := far[i]) and isfinite(one.mean_kl) else 0.0 for i in order]
            chart = column_chart(values, [run.setup.columns[i].label for i in order], height)
            rest = f"nats a token, mean over the reply at scale 0 ({counted(len(run.scored.tokens), 'token')})"
            lines += ["", title("KL(×0 ‖ scale)", rest)]
            if max(map(len, chart)) <= self.columns:  # else the lines below tell it
                lines += [Content.assemble((line, "$primary-lighten-2")) for line in chart]
            lines.append("")
            lines += [Content.assemble((f"! {clean_line(note, 300)}", "$text-warning")) for note in run.scored.notes]
        elif run.score_failed:
            lines += [Content.assemble((f"✗ no KL: {clean_line(run.score_failed, 300)}", "$text-error"))]
        elif not run.active:
            lines += [Content.assemble(("KL is being computed …", QUIET))]
        here = len(lines) + chosen
        lines += [self._line(run.rows[i], far[i], i == order[chosen]) for i in order]
        self.put(lines)
        return here

    def _line(self, row: Row, far: Distance | None, here: bool) -> Content:
        figures = f"KL {nats(far.mean_kl):>6}  same {far.same:4.0%}  " if far else ""
        bar = set_cell_size(hbar(far.mean_kl / self._top, BAR), BAR + 1) if far and self._top > 0 and isfinite(far.mean_kl) else ""
        text = clean_line(row.note if row.phase in ("failed", "lost") else row.text.strip(), 400) or ("…" if row.active else "(nothing)")
        return Content.assemble((f"{'▸' if here else ' '} ×{row.column.label:<6} {figures}{bar}{text}", "bold" if here else ""))


class SweepScreen(SteadySize, Screen):
    """Arrows choose a scale; its reply stands below, what differs from scale 0 marked."""

    BINDINGS = bindings("sweep")
    CSS_PATH = "../compare.tcss"
    PALETTE_PANES = HELP_PANES = ("sweep", "app")

    def __init__(self, control: Control) -> None:
        super().__init__(id="sweep-screen")
        self._control = control
        self._chosen = 0
        self._hint = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="header", markup=False)
        with VerticalScroll(id="sweep-rows", can_focus=False):
            yield SweepPanel()
        yield Static("", id="sweep-title", markup=False)
        with VerticalScroll(id="sweep-reply", can_focus=False):
            yield Static("", id="sweep-text", markup=False)
        yield Static("", id="hint", markup=False)
        yield KeyLine()

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    @property
    def _run(self) -> Run:
        return self._control.comparing.compare.sweep

    async def show(self) -> None:
        """Bring everything to the sweep."""
        if not self.query(KeyLine) or not self.query("#sweep-text"):  # not all there yet, or the app is leaving
            return
        state, run = self._control.state, self._run
        order = by_scale(run.setup.columns)
        self._chosen = min(self._chosen, len(order) - 1)
        self.query_one("#header", Static).update(header_line(state, self.size.width), layout=False)
        line = self.query_one(SweepPanel).show(run, self._chosen, CHART_HEIGHT if self.size.height >= 34 else 4)
        self.query_one("#sweep-rows", VerticalScroll).scroll_to_region(Region(0, line, 1, 1), animate=False)
        row, base = run.rows[order[self._chosen]], clean(run.rows[0].text)
        facts = Content("\n").join(row_lines(row))
        self.query_one("#sweep-title", Static).update(Content.assemble(
            (clean_line(mix_text(row.column.mix), 200), "bold $accent"), "  ", facts))
        text = clean(row.text)
        spans = [(change.second_start, change.second_end) for change in changes(base, text)] if not run.active else []
        self.query_one("#sweep-text", Static).update(marked(text, spans))
        hint = gone_text(state.items) if state.engine == "gone" else self._hint
        self.query_one("#hint", Static).display = bool(hint)
        self.query_one("#hint", Static).update(Content(clean_line(hint, 300)))
        self.refresh_bindings()

    async def action_scale(self, by: int) -> None:
        self._chosen, self._hint = min(max(self._chosen + by, 0), len(self._run.rows) - 1), ""
        self.query_one("#sweep-reply", VerticalScroll).scroll_home(animate=False)
        await self.show()

    def action_scroll(self, by: int) -> None:
        scroll = self.query_one("#sweep-reply", VerticalScroll)
        scroll.scroll_relative(y=by * max(scroll.size.height - 1, 1), animate=False)

    async def action_export(self) -> None:
        self._hint = export(self._run, self._control.state.clock())
        await self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        if action not in ("stop", "back"):
            return True
        return self._run.busy == (action == "stop")

    def action_stop(self) -> None:
        self.stop_here()

    def stop_here(self) -> bool:
        """Ctrl+C stops what this screen shows; False when nothing runs."""
        return self._control.comparing.stop()

    def action_back(self) -> None:
        self.dismiss()

    action_leave = action_back

    def action_target(self, pane: str) -> DOMNode:
        return self if pane == "sweep" else self.app

"""One step by the names of its kernels or ops, as torch's profiler recorded it."""
from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Static

from ..control import Control
from ..header import header_line
from ..keys import bindings
from ..panels.trace import TracePanel
from ..widgets.key_line import KeyLine
from .steady import SteadySize


class TraceScreen(SteadySize, Screen):
    """The trace that was made last; the engine goes on behind it."""

    BINDINGS = bindings("trace")
    PALETTE_PANES = HELP_PANES = ("trace", "app")
    AUTO_FOCUS = "#trace-rows"

    def __init__(self, control: Control) -> None:
        super().__init__(id="trace-screen")
        self._control = control

    def compose(self) -> ComposeResult:
        yield Static("", id="header", markup=False)
        with VerticalScroll(id="trace-rows"):
            yield TracePanel()
        yield Static("", id="hint", markup=False)
        yield KeyLine()

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    async def show(self) -> None:
        """Bring it to the store."""
        if not self.query(KeyLine) or not self.query(TracePanel):  # not all there yet, or the app is leaving
            return
        state = self._control.state
        self.query_one("#header", Static).update(header_line(state, self.size.width), layout=False)
        self.query_one(TracePanel).show(state)
        why, hint = self._control.why_no_trace(), self.query_one("#hint", Static)
        hint.display = bool(why)
        hint.update(Content(why))

    async def action_again(self) -> None:
        self._control.trace()
        self.query_one("#trace-rows", VerticalScroll).scroll_home(animate=False)
        await self.show()

    def action_back(self) -> None:
        self.dismiss()

    def action_target(self, pane: str) -> DOMNode:
        return self if pane == "trace" else self.app

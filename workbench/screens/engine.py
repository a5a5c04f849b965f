"""The engine's panels on the whole screen."""
from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Static

from ..control import Control
from ..header import header_line
from ..keys import bindings
from ..panels.engine import EventsPanel, Panel, SlotsPanel, StepsPanel
from ..panels.kv import KvMapPanel
from ..widgets.key_line import KeyLine
from .steady import SteadySize
from .trace import TraceScreen


class EngineScreen(SteadySize, Screen):
    """KV memory on the left; steps, slots and events on the right; one column on narrow terminals."""

    BINDINGS = bindings("engine")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    PALETTE_PANES = ("engine", "app")

    def __init__(self, control: Control) -> None:
        super().__init__(id="engine-screen")
        self._control = control

    def compose(self) -> ComposeResult:
        yield Static("", id="header", markup=False)
        with VerticalScroll(id="engine-columns"):
            with VerticalScroll():
                yield KvMapPanel("kv")
            with VerticalScroll():
                yield StepsPanel("steps")
                yield SlotsPanel("slots")
                yield EventsPanel("events")
        yield KeyLine()

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    async def show(self) -> None:
        """Bring every panel to the store."""
        if not self.query("#header"):  # not there yet, or the app is leaving
            return
        self.query_one("#header", Static).update(header_line(self._control.state, self.size.width), layout=False)
        for panel in self.query(Panel):
            panel.show(self._control.state)

    def action_back(self) -> None:
        self.dismiss()

    def action_clear_cache(self) -> None:
        self.app.notify(self._control.clear_cache(), markup=False)

    def action_trace(self) -> None:
        self._control.trace()
        self.action_last_trace()

    def action_last_trace(self) -> None:
        self.app.push_screen(TraceScreen(self._control))

    def action_target(self, pane: str) -> DOMNode:
        return self if pane == "engine" else self.app

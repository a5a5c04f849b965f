"""The main screen: adapters, chat, engine panels."""
from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Footer, Static

from ..commands import run_command
from ..control import MAX_PROMPT, Control
from ..header import header_line, welcome
from ..keys import bindings
from ..panels.adapters import AdaptersPanel
from ..panels.chat import ItemView, Transcript
from ..panels.engine import EventsPanel, KvPanel, Panel, SlotsPanel, StepsPanel, status_line
from ..text import clean_line, size_text
from ..widgets.adapter_list import AdapterList
from ..widgets.prompt import Prompt
from .engine import EngineScreen
from .help import HelpScreen

TOO_SMALL = "terminal too small: at least 20×6, better 80×24"


class EnginePanels(VerticalScroll, can_focus=False):
    """The panels of the engine one under the other."""

    def compose(self) -> ComposeResult:
        yield SlotsPanel("slots")
        yield KvPanel("kv")
        yield StepsPanel("steps")
        yield EventsPanel("events")

    def show(self, control: Control) -> None:
        for panel in self.query(Panel):
            panel.show(control.state)


class BenchScreen(Screen):
    """Shows the store; keys and messages of its panes become calls of `control`."""

    BINDINGS = bindings("bench")
    HORIZONTAL_BREAKPOINTS = [(0, "-nano"), (20, "-narrow"), (60, "-mid"), (110, "-wide"), (150, "-broad")]
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (6, "-tall")]
    AUTO_FOCUS = "#prompt"
    PALETTE_PANES = ("bench", "adapters", "reply", "prompt", "app")

    def __init__(self, control: Control) -> None:
        super().__init__()
        self.control = control
        self._hint = ""

    def compose(self) -> ComposeResult:
        yield Static(TOO_SMALL, id="too-small", markup=False)
        yield Static(header_line(self.control.state, self.app.size.width), id="header", markup=False)
        with Horizontal(id="body"):
            yield AdaptersPanel(self.control)
            with Vertical(id="middle"):
                yield Transcript()
                yield Static("", id="hint", markup=False)
                yield Prompt(lambda: self.control.state.engine == "gone")
            yield EnginePanels(id="engine-side")
        yield Static("", id="status", markup=False)
        yield Footer()

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    async def show(self) -> None:
        """Bring every pane to the store."""
        await self.show_rest()
        await self.show_chat()

    async def show_chat(self) -> None:
        if not self._has_panes():
            return
        state = self.control.state
        await self.query_one(Transcript).show(state.items, welcome(state))

    async def show_rest(self) -> None:
        """All but the chat."""
        if not self._has_panes():
            return
        state = self.control.state
        self.query_one("#header", Static).update(header_line(state, self.size.width), layout=False)
        self._show_hint(clean_line(state.hint, 200))
        self.query_one(AdaptersPanel).show()
        if self.has_class("-wide") or self.has_class("-broad"):
            self.query_one(EnginePanels).show(self.control)
        else:
            self.query_one("#status", Static).update(status_line(state, self.size.width), layout=False)

    def _has_panes(self) -> bool:
        """False before they are made and while the app is leaving; a redraw that was asked for may fall there."""
        return bool(self.query("#header"))

    def _show_hint(self, text: str) -> None:
        if text != self._hint:
            self._hint = text
            shown = self.query_one("#hint", Static)
            shown.update(Content(text))
            shown.display = bool(text)

    # -- messages of the panes ------------------------------------------------------------------
    @on(AdaptersPanel.Changed)
    async def _board_changed(self) -> None:
        self.control.send_mix()
        await self.show()

    @on(ItemView.Restart)
    async def _card_answered(self) -> None:
        await self.app.run_action("restart_engine")

    @on(Prompt.TooLong)
    async def _too_long(self, event: Prompt.TooLong) -> None:
        self.control.state.hint = f"not pasted: {size_text(event.size)} of text, a message holds {size_text(MAX_PROMPT)}"
        await self.show()

    @on(Prompt.Sent)
    async def _sent(self, event: Prompt.Sent) -> None:
        state, prompt = self.control.state, self.query_one(Prompt)
        state.hint = ""
        if event.text.startswith("/"):
            self._command(event.text.strip())
            prompt.taken()
        elif self.control.ask(event.text):
            prompt.taken()
        self.query_one(Transcript).anchor()
        await self.show()

    def _command(self, line: str) -> None:
        try:
            self.control.state.notice(run_command(self.control, line))
        except ValueError as error:
            self.control.state.notice(str(error), "error")

    # -- keys -----------------------------------------------------------------------------------
    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(self._pane()))

    def action_engine(self) -> None:
        self.app.push_screen(EngineScreen(self.control))

    def action_panels(self) -> None:
        self.toggle_class("-over" if self.has_class("-narrow") else "-folded")

    async def action_stop(self) -> None:
        if not self.control.stop():
            if self.control.state.engine == "loading":
                self.control.cancel_load()
            else:
                self.action_focus_prompt()
        await self.show()

    async def action_regenerate(self) -> None:
        self.control.state.hint = ""
        self.control.regenerate()
        self.query_one(Transcript).anchor()
        await self.show()

    async def action_new_chat(self) -> None:
        self.control.new_chat()
        await self.show()

    async def action_toggle_sampling(self) -> None:
        self.control.toggle_sampling()
        await self.show()

    def action_focus_adapters(self) -> None:
        self.set_class(self.has_class("-narrow"), "-over")
        self.remove_class("-folded")
        self.query_one(AdapterList).focus()

    def action_focus_prompt(self) -> None:
        self.remove_class("-over")
        self.query_one(Prompt).focus()

    def action_target(self, pane: str) -> DOMNode | None:
        """The node that carries out the actions of a pane; for replies the focused one, else the last."""
        if pane == "reply":
            views = list(self.query(ItemView))
            return next((view for view in views if view.has_focus), views[-1] if views else None)
        return {"bench": self, "adapters": self.query_one(AdaptersPanel), "prompt": self.query_one(Prompt)}.get(pane, self.app)

    def _pane(self) -> str:
        focused = self.focused
        if isinstance(focused, Prompt):
            return "prompt"
        if isinstance(focused, ItemView):
            return "reply"
        return "adapters"

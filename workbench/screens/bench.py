"""The main screen: adapters, chat, engine panels."""
from __future__ import annotations

from time import monotonic

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Static

from ..commands import run_command
from ..control import MAX_PROMPT, Control
from ..header import header_line, welcome
from ..keys import bindings
from ..panels.adapters import AdaptersPanel
from ..panels.chat import Transcript
from ..panels.engine import EventsPanel, Panel, SlotsPanel, StepsPanel, status_line
from ..panels.item import ItemView
from ..panels.kv import KvPanel
from ..text import clean_line, counted, size_text
from ..widgets.adapter_list import AdapterList
from ..widgets.ask import AskField
from ..widgets.key_line import KeyLine
from ..widgets.prompt import Prompt
from .details import DetailsScreen
from .engine import EngineScreen
from .steady import KeptPane

TOO_SMALL = "terminal too small: at least 20×6, better 80×24"
JUST_ENDED_S = 0.7
"""Esc so soon after a reply ended was meant to stop it: it does not move the focus"""


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


class BenchScreen(KeptPane, Screen):
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
        self._busy = False
        self._ended_at = 0.0

    def compose(self) -> ComposeResult:
        yield Static(TOO_SMALL, id="too-small", markup=False)
        yield Static(header_line(self.control.state, self.app.size.width), id="header", markup=False)
        with Horizontal(id="body"):
            yield AdaptersPanel(self.control, lambda: self.query_one(Prompt).text)
            with Vertical(id="middle"):
                yield Transcript()
                yield Static("", id="hint", markup=False)
                yield Prompt(lambda: self.control.state.engine == "gone")
            yield EnginePanels(id="engine-side")
        yield Static("", id="status", markup=False)
        yield KeyLine()

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.show)

    def on_key(self, event: events.Key) -> None:
        """A letter that no pane waits for belongs to the prompt; what it gets it takes itself: it had no focus yet when this was typed."""
        if (self.focused is None or isinstance(self.focused, Prompt)) and event.is_printable and event.character:
            event.stop()
            event.prevent_default()
            self.query_one(Prompt).insert(event.character)

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
        self._show_busy()
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

    def _show_busy(self) -> None:
        """What Esc does, in the footer."""
        state = self.control.state
        busy = bool(state.running) or state.engine == "loading" or state.reads_adapters
        if busy != self._busy:
            self._busy = busy
            self._ended_at = 0.0 if busy else monotonic()
            self.refresh_bindings()
            if not busy:
                self.set_timer(JUST_ENDED_S, self.refresh_bindings)

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

    @on(AdaptersPanel.Inspected)
    def _inspected(self, event: AdaptersPanel.Inspected) -> None:
        def take_prefix(prefix: str | None) -> None:
            if prefix:
                self.query_one(Prompt).put_back(prefix)
                self.action_focus_prompt()

        self.app.push_screen(DetailsScreen(self.control, event.name), take_prefix)

    @on(ItemView.Restart)
    async def _card_answered(self) -> None:
        await self.app.run_action("restart_engine")

    @on(ItemView.Copied)
    async def _copied(self, event: ItemView.Copied) -> None:
        self.control.state.hint = f"copied {counted(event.characters, 'character')}"
        await self.show_rest()

    @on(Prompt.TooLong)
    async def _too_long(self, event: Prompt.TooLong) -> None:
        self.control.state.hint = f"not pasted: {size_text(event.size)} of text, a message holds {size_text(MAX_PROMPT)}"
        await self.show()

    @on(Prompt.Sent)
    async def _sent(self, event: Prompt.Sent) -> None:
        state, prompt = self.control.state, self.query_one(Prompt)
        state.hint = ""
        if event.text.startswith("/"):
            done = self._command(event.text.strip())
        else:
            done = self.control.ask(event.text)
        (prompt.taken if done else prompt.put_back)(event.text)
        self.query_one(Transcript).anchor()
        await self.show()

    def _command(self, line: str) -> bool:
        try:
            self.control.state.notice(run_command(self.control, line))
        except ValueError as error:
            self.control.state.hint = str(error)
            return False
        return True

    # -- keys -----------------------------------------------------------------------------------
    def action_compare(self) -> None:
        from .compare import CompareScreen  # with what tells texts apart: only when it is needed

        self.app.push_screen(CompareScreen(self.control))

    def action_engine(self) -> None:
        self.app.push_screen(EngineScreen(self.control))

    def action_panels(self) -> None:
        narrow = self.has_class("-narrow")
        self.toggle_class("-over" if narrow else "-folded")
        if narrow and self.has_class("-over"):
            self.action_focus_adapters()
        elif self.pane() == "adapters":
            self.action_focus_prompt()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Esc stops what runs, else it changes between the prompt and the adapters; in a field it is the field's."""
        if action not in ("stop", "focus_adapters", "focus_prompt", "pane"):
            return True
        if isinstance(self.focused, AskField):
            return False
        if action == "pane":
            return True
        state = self.control.state
        stops = bool(state.running) or state.engine == "loading" or state.reads_adapters or monotonic() - self._ended_at < JUST_ENDED_S
        in_prompt = isinstance(self.focused, Prompt)
        return {"stop": stops, "focus_adapters": not stops and in_prompt}.get(action, not stops and not in_prompt)

    def action_stop(self) -> None:
        if not self.control.stop():
            self.control.cancel_load()

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
        self.set_focus(self.query_one(AdapterList))

    def action_focus_prompt(self) -> None:
        self.remove_class("-over")
        self.set_focus(self.query_one(Prompt))  # at once, as all moves here: the next key is typed there

    def action_pane(self, by: int) -> None:
        """To the next pane, or the one before: adapters, the last item of the chat, the prompt."""
        panes = ["adapters", "reply", "prompt"] if self.query(ItemView) else ["adapters", "prompt"]
        here = self.pane()
        wanted = panes[(panes.index(here) + by) % len(panes)] if here in panes else "prompt"
        if wanted == "adapters":
            self.action_focus_adapters()
        else:
            self.action_focus_prompt()
        if wanted == "reply":
            self.set_focus(self.query(ItemView).last())

    def action_target(self, pane: str) -> DOMNode | None:
        """The node that carries out the actions of a pane; for replies the focused one, else the last."""
        if pane == "reply":
            views = list(self.query(ItemView))
            return next((view for view in views if view.has_focus), views[-1] if views else None)
        return {"bench": self, "adapters": self.query_one(AdaptersPanel), "prompt": self.query_one(Prompt)}.get(pane, self.app)

    def pane(self) -> str:
        """The pane that has the focus."""
        focused = self.focused
        if isinstance(focused, Prompt):
            return "prompt"
        if isinstance(focused, ItemView):
            return "reply"
        return "adapters"

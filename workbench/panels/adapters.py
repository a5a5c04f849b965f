"""The adapters pane: the list, what a change of the mix does, the question fields, and the facts of the adapter under the cursor."""
from __future__ import annotations

from collections.abc import Callable

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from ..adapter_facts import fact_lines
from ..check_text import verdict_text
from ..control import Control
from ..keys import bindings
from ..live_change import CHANGES
from ..mixboard import MixBoard
from ..text import clean_line
from ..widgets.adapter_list import AdapterList
from ..widgets.ask import Ask
from ..widgets.invocation import InvocationEditor
from ..widgets.load_progress import reading_text
from ..widgets.mix_keys import MixKeys
from .engine import Panel, title


class Details(Panel):
    """The facts of one adapter."""

    WRAPS = True

    def show(self, control: Control, name: str | None) -> None:
        if name is None:
            self.put([title("DETAILS")])
        else:
            self.put([title("DETAILS", "i: all of it"), *fact_lines(control.state, name, self.columns), *_found(control, name)])


def _found(control: Control, name: str) -> list[str]:
    """What the latest check says, in a line."""
    report = control.checks.report(name)
    if name in control.checks.doing or report is None:
        return ["being checked …"] if name in control.checks.doing else []
    effect = f" · {report.changed_share:.0%} of tokens change" if report.effect else ""
    return [f"check: {verdict_text(report)}{effect}"]


class AdaptersPanel(MixKeys, Vertical):
    """Keys act on the adapter under the cursor; every change goes to `control`."""

    BINDINGS = bindings("adapters")

    class Changed(Message):
        """Something on the board changed: show it now."""

    class Inspected(Message):
        """An adapter is to be shown on the whole screen."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self, control: Control, draft: Callable[[], str]) -> None:
        """`draft` is the message that is being typed."""
        super().__init__(id="adapters")
        self._control = control
        self._draft = draft
        self._sure = ""
        self._reading = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="adapters-title", markup=False)
        yield AdapterList()
        yield Static("", id="adapters-change", markup=False)
        yield Static("", id="adapters-reading", markup=False)
        yield Ask()
        yield InvocationEditor(self._control)
        yield Details("details")

    def show(self) -> None:
        state = self._control.state
        on_now, total = len(state.mix()), len(state.board.names)
        board = state.board.now
        count = "BYPASSED: base only" if board.bypass else f"solo: {board.solo}" if board.solo else f"{on_now} on / {total}"
        coming = len(state.wanted) + len(state.reloading)
        reading = f"reading {coming}" if coming and state.model else ""
        facts = "  ".join(filter(None, (count, reading)))
        self.query_one("#adapters-title", Static).update(title("ADAPTERS", clean_line(facts)), layout=False)
        self.query_one(AdapterList).show(state, state.board)
        ways = " ".join(f"{'●' if way == state.change else '○'}{way}" for way in CHANGES)
        self.query_one("#adapters-change", Static).update(Content.assemble(("c", "bold $accent"), f" live {ways}"), layout=False)
        self.query_one(InvocationEditor).show()
        self._show_reading()
        self._show_details()

    @on(AdapterList.Moved)
    def _moved(self) -> None:
        self._sure = ""
        self._show_details()

    def _show_reading(self) -> None:
        """How far a large adapter is, under the list."""
        event, shown = self._control.state.reading, self.query_one("#adapters-reading", Static)
        text = reading_text(event, self.size.width - 2) if event else ""
        if text != self._reading:
            self._reading = text
            shown.display = bool(text)
            shown.update(text)

    def _show_details(self) -> None:
        self.query_one(Details).show(self._control, self.name_here)

    @property
    def mix_board(self) -> MixBoard:
        return self._control.state.board

    @property
    def asker(self) -> Ask:
        return self.query_one("#ask", Ask)

    def hint(self, text: str) -> None:
        self._control.state.hint = text

    # -- mouse ----------------------------------------------------------------------------------
    @on(AdapterList.Toggled)
    def _clicked_box(self, event: AdapterList.Toggled) -> None:
        self.change(lambda board: board.toggle(event.name))
        self._tell_invocation(event.name)

    @on(AdapterList.Scaled)
    def _dragged(self, event: AdapterList.Scaled) -> None:
        self.change(lambda board: board.set_scale(event.name, event.scale, joined=event.dragging))

    @on(events.Click, "#adapters-change")
    def _clicked_change(self) -> None:
        self.action_change()

    # -- keys -----------------------------------------------------------------------------------
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Keys typed into the field are not the list's."""
        return not any(field.has_focus_within for field in self.query(Ask))

    def action_toggle(self) -> None:
        super().action_toggle()
        self._tell_invocation(self.name_here)

    def action_pin(self) -> None:
        if (name := self.name_here) is not None:
            self._control.pin(name)

    def action_add(self, text: str = "") -> None:
        self.query_one(Ask).ask("add adapters: path of a folder or file, or a sample's name", text, self.add_paths)

    def add_paths(self, text: str) -> str | None:
        """Ask the engine for the adapters at these paths; a sentence when one is not there."""
        if problem := self._control.add_paths(text):
            return problem
        self.query_one(AdapterList).follow_new()
        self.post_message(self.Changed())
        return None

    def action_reload(self) -> None:
        if (name := self.name_here) is not None:
            self._control.reload(name)
            self.post_message(self.Changed())

    def action_unload(self) -> None:
        name = self.name_here
        if name is None:
            return
        if self._control.state.board.acts(name) and self._sure != name:
            self._sure = name
            self.hint(f"{name} acts now: x again unloads it")
        else:
            self._control.unload(name)
        self.post_message(self.Changed())

    def action_details(self) -> None:
        if (name := self.name_here) is not None:
            self.post_message(self.Inspected(name))

    def action_effect(self) -> None:
        if (name := self.name_here) is not None:
            self._control.checks.run(name)
            self.post_message(self.Inspected(name))

    def action_invocation(self) -> None:
        name = self.name_here
        info = self._control.state.adapters.get(name or "")
        if name is not None and info is not None:
            self.query_one(InvocationEditor).open(name, self._draft())

    def action_change(self) -> None:
        self._control.next_change()
        self.post_message(self.Changed())

    def action_invoke(self) -> None:
        if (name := self.name_here) is not None:
            self._control.invoke(name)
            self.post_message(self.Changed())

    def _tell_invocation(self, name: str | None) -> None:
        """An aLoRA that was switched on changes no ordinary reply: say what makes it act."""
        info = self._control.state.adapters.get(name or "")
        if info and info.invocation and self._control.state.board.acts(info.name):
            self.hint(f"{info.name} is on, but acts only after its invocation: v invokes it on this chat")

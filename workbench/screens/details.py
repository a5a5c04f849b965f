"""One adapter on the whole screen: what it is, what of it acts, how far it moves the weights, and what it does to the base's words."""
from __future__ import annotations

import re

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Static

from ...engine.protocol import CheckFailed
from ..adapter_facts import fact_lines
from ..charts import BAR
from ..check_text import MARKS, sections
from ..control import Control
from ..header import header_line
from ..keys import bindings
from ..panels.engine import Panel, title
from ..reload_text import file_line
from ..text import clean_line
from ..widgets.key_line import KeyLine
from .steady import SteadySize

_BARS = re.compile(f"([{BAR}]+)")
_STYLES = {MARKS["refused"]: "$text-error", MARKS["warning"]: "$text-warning"}


class ReportPanel(Panel):
    """The report of the latest check, or what is known before it is there."""

    WRAPS = True

    def show(self, control: Control, name: str) -> None:
        state, checks = control.state, control.checks
        report, doing, failed = checks.report(name), checks.doing.get(name), checks.failures.get(name)
        if report is None:
            self.put([*self._progress(control, doing, failed), "", title(clean_line(name, 60)), *fact_lines(state, name, self.columns)[1:]])
            return
        view = state.view(name)
        lines = [f"{file_line(view.file)}. Fields and metadata below are those of the file now", ""] if view and view.file else []
        if now := self._progress(control, doing, failed):
            lines += [*now, ""]
        for part in sections(report, self.columns, "" if now else "not run yet: F5 runs a few prompts with and without it"):
            lines += [title(part.title), *(self._line(line) for line in part.lines), ""]
        self.put(lines)

    def _progress(self, control: Control, doing: str | None, failed: CheckFailed | None) -> list[str]:
        """What a check does, or why it ended; nothing when none was asked for."""
        if failed:
            return ["the check was stopped: F5 runs one"] if failed.cancelled else [f"✗ {clean_line(failed.message, 600)}"]
        if doing is None:
            return []
        waits = "waits until the reply is written" if control.state.running else "waits for its turn"
        return [f"being checked: {clean_line(doing, 80) if doing and not control.state.running else waits} …"]

    def _line(self, line: str) -> Content:
        if line[:1] in _STYLES:
            return Content.assemble((line, _STYLES[line[0]]))
        return Content.assemble(*((part, "$primary-lighten-2" if part[:1] in BAR else "") for part in _BARS.split(line)))


class DetailsScreen(SteadySize, Screen):
    """Asks for a check when it is opened; F5 asks for an effect run, Esc stops what is asked for."""

    BINDINGS = bindings("details")
    PALETTE_PANES = ("details", "app")

    def __init__(self, control: Control, name: str) -> None:
        super().__init__(id="details-screen")
        self._control, self._name = control, name
        self._checking = False

    def compose(self) -> ComposeResult:
        yield Static("", id="header", markup=False)
        with VerticalScroll(id="details-scroll"):
            yield ReportPanel("report")
        yield KeyLine()

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    async def show(self) -> None:
        """Bring the report to the store."""
        control = self._control
        if not self.query(ReportPanel):  # not all there yet, or the app is leaving
            self.call_after_refresh(self.show)
            return
        control.checks.want(self._name)
        self.query_one("#header", Static).update(header_line(control.state, self.size.width), layout=False)
        self.query_one(ReportPanel).show(control, self._name)
        if self._checking != (self._name in control.checks.doing):
            self._checking = not self._checking
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Esc stops a check or leaves; the keys of a prompt prefix are there for adapters that have one."""
        if action in ("stop", "leave"):
            return (self._name in self._control.checks.doing) is (action == "stop")
        return action not in ("insert_prefix", "system_prefix") or bool(self._control.prompt_prefix(self._name))

    async def action_effect(self) -> None:
        self._control.checks.run(self._name)
        await self.show()

    def action_insert_prefix(self) -> None:
        """Back to the chat with the prefix in the prompt, to be looked at and sent by the person."""
        self.dismiss(self._control.prompt_prefix(self._name))

    def action_system_prefix(self) -> None:
        self._control.system = self._control.prompt_prefix(self._name)
        self._control.state.hint = f"the system message is now the prompt prefix of {self._name}; /system alone takes it away"
        self.dismiss("")

    async def action_stop(self) -> None:
        self._control.checks.stop(self._name)
        await self.show()

    def action_leave(self) -> None:
        self.action_back()

    def action_back(self) -> None:
        self.dismiss("")

    def action_target(self, pane: str) -> DOMNode:
        return self if pane == "details" else self.app

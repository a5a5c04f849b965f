"""The checks of adapters as the screen knows them: what was found, what runs, what failed. Plain Python, no widgets."""
from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ..engine import protocol as p
from .state import BenchState


class AdapterChecks:
    """Reports by adapter, each of the content that is loaded: a reload or another invocation makes it stale."""

    def __init__(self, state: BenchState, send: Callable[[p.Command], None]) -> None:
        self._state, self._send = state, send
        self._reports: dict[str, p.CheckReport] = {}
        self.doing: dict[str, str] = {}
        """adapters whose check was asked for -> what it does now, "" while it waits"""
        self.failures: dict[str, p.CheckFailed] = {}
        """of the latest check, where it came to no report"""

    def report(self, name: str) -> p.CheckReport | None:
        """The latest report, when it is of what is loaded now; one whose adapter is gone stays readable."""
        report, info = self._reports.get(name), self._state.adapters.get(name)
        if report is None or info is None or report.info is None:
            return report
        return report if _content(report.info) == _content(info) else None

    def want(self, name: str) -> None:
        """Ask for a report without an effect run, unless there is one, or one is on its way, or it failed."""
        if name in self._state.adapters and self.report(name) is None and name not in self.doing and name not in self.failures:
            self._ask(name, False)

    def run(self, name: str) -> None:
        """Ask for a report with an effect run."""
        if name in self._state.adapters:
            self._ask(name, True)

    def stop(self, name: str) -> None:
        """Give up the check that was asked for; it counts as stopped at once."""
        self._send(p.CancelCheck(name))
        self.receive(p.CheckFailed(name, "it was stopped", cancelled=True))

    def receive(self, event: p.Event) -> None:
        match event:
            case p.CheckProgress():
                self.doing[event.name] = event.text
            case p.CheckFinished():
                self.doing.pop(event.name, None)
                self.failures.pop(event.name, None)
                self._reports[event.name] = _with_effect_of(event.report, self._reports.get(event.name))
            case p.CheckFailed():
                self.doing.pop(event.name, None)
                self.failures[event.name] = event
            case p.AdapterLoaded() | p.AdapterChanged():
                self.failures.pop(event.adapter.name, None)
            case p.ModelLoaded():
                self._reports.clear()
                self.failures.clear()
            case p.EngineFailed():
                self.doing.clear()
        self._state.checking = next((name for name, text in self.doing.items() if text), "")

    def _ask(self, name: str, effect: bool) -> None:
        self.failures.pop(name, None)
        self.doing.setdefault(name, "")
        self._send(p.CheckAdapter(name, effect))


def _content(info: p.AdapterInfo) -> tuple[str, tuple[int, ...]]:
    return info.digest, info.invocation_tokens


def _with_effect_of(new: p.CheckReport, old: p.CheckReport | None) -> p.CheckReport:
    """`new`, with the effect run of `old` where it has none of its own and the content is the same."""
    if new.effect or old is None or not old.effect or old.info is None or new.info is None or _content(old.info) != _content(new.info):
        return new
    return replace(new, effect=old.effect, findings=old.findings)

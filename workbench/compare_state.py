"""What the compare screen knows: its columns, the runs that were asked, and how far they are. Plain Python, no widgets."""
from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import replace as changed

from ..engine import protocol as p
from .comparison import LABELS, Round, Setup
from .comparison_row import Row
from .mixboard import MixBoard
from .votes import Choice, Tally

MOST_COLUMNS = len(LABELS)


@dataclass
class Lane:
    """One column of the screen: a letter that stays with it, and the mix that is set in it now."""

    label: str
    board: MixBoard


@dataclass
class Run:
    """One prompt to several mixes as rows of one batch, and then the first row's text read under all of them."""

    prompt: p.Prompt
    asked: str
    setup: Setup
    rows: list[Row]
    order: tuple[int, ...]
    """of the rows, from left to right"""
    swept: str = ""
    """the adapter of which every row has another scale; "" when it is no sweep"""
    blind: bool = False
    hidden: bool = False
    """a blind run before its vote: whose rows they are is not shown"""
    choice: Choice | None = None
    """of the left one (first) and the right one (second)"""
    score_id: int = 0
    """0 until it was asked for"""
    scored: p.Scored | None = None
    score_failed: str = ""
    tally: Tally | None = None
    """the votes so far between the first two columns"""

    @property
    def active(self) -> bool:
        return any(row.active for row in self.rows)

    @property
    def scoring(self) -> bool:
        return bool(self.score_id) and self.scored is None and not self.score_failed

    @property
    def busy(self) -> bool:
        """Whether there is something to stop: replies, or figures that are being computed."""
        return self.active or self.scoring

    @property
    def whole(self) -> bool:
        """Whether every row came to an end of its own or of the person's."""
        return all(row.phase == "done" for row in self.rows)

    @property
    def round(self) -> Round:
        return Round(self.prompt, tuple(row.reply for row in self.rows), self.scored, self.score_failed)

    def row(self, label: str) -> Row | None:
        return next((row for row in self.rows if row.column.label == label), None)

    def made_of(self, adapters: dict[str, p.AdapterInfo]) -> None:
        """The adapters as they are now are what its rows begin with."""
        names = dict.fromkeys(use.name for row in self.rows for use in row.column.mix)
        self.setup = changed(self.setup, adapters=tuple(adapters[name] for name in names if name in adapters))

    def outdated(self, adapters: dict[str, p.AdapterInfo]) -> str:
        """The first adapter of which other content is loaded now than it was made with, or none; "" when all are the same."""
        return next(iter(self.contents(adapters)), "")

    def contents(self, adapters: dict[str, p.AdapterInfo]) -> dict[str, str]:
        """Digests for the names that mean something else now."""
        return {info.name: info.digest for info in self.setup.adapters
                if info.name not in adapters or adapters[info.name].digest != info.digest}


@dataclass
class CompareState:
    """All that the screen shows beside the store of the bench."""

    lanes: list[Lane] = field(default_factory=list)
    run: Run | None = None
    sweep: Run | None = None
    blind: bool = False
    after_chat: bool = False
    """whether the prompt continues the chat"""
    opening: str = ""
    """an invocation that the prompt ends with, in place of the template's"""
    hint: str = ""
    early: str = ""
    """a hint that something cannot be before the replies or the figures are there: then it is over"""
    draft: str = ""
    """what stood in the prompt when the screen was left"""

    def too_early(self, hint: str) -> None:
        """Say it until the replies or the figures are there."""
        self.hint = self.early = hint

    def arrived(self) -> None:
        """What was too early is not any more."""
        if self.hint == self.early:
            self.hint = ""

    @property
    def runs(self) -> list[Run]:
        return [run for run in (self.run, self.sweep) if run]

    @property
    def active(self) -> bool:
        """Whether replies are being written."""
        return any(run.active for run in self.runs)

    def lane(self, label: str) -> Lane | None:
        return next((lane for lane in self.lanes if lane.label == label), None)

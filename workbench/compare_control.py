"""What the person does on the compare screen, turned into commands; and the engine's answers, folded into its state. No widgets."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations

from ..engine import protocol as p
from .compare_state import MOST_COLUMNS, CompareState, Lane, Run
from .comparison import LABELS, Column, Setup, mixes_to_score, sweep_columns
from .comparison_row import Row
from .mixboard import MixBoard, Setting
from .scales import parse_scales
from .state import BenchState
from .text import clean_line, counted, listed
from .transcript import history_of
from .votes import Choice, Tally, VoteFile, side_of, tally_of

SWEPT_SCALES = "0:1.5:0.25"


class CompareControl:
    """The person's side of a comparison. Methods change `compare`, and send commands; none waits for the engine."""

    def __init__(self, state: BenchState, send: Callable[[p.Command], None], new_id: Callable[[], int], votes: VoteFile,
                 rng: random.Random | None = None) -> None:
        self.state, self.compare, self.votes = state, CompareState(), votes
        self._send, self._new_id = send, new_id
        self._rng = rng or random.Random()

    # -- columns --------------------------------------------------------------------------------
    def open(self) -> None:
        """Two columns at first: A has the mix of the chat, B is the base."""
        if not self.compare.lanes:
            off = self._board(lambda name: Setting(scale=self.state.board[name].scale))
            self.compare.lanes = [Lane("A", self._board_of_chat()), Lane("B", off)]
        self.match_boards()

    def match_boards(self) -> None:
        """Every column knows the adapters that the bench knows; one that left takes its part of a mix along, and that is said."""
        names = self.state.board.names
        for lane in self.compare.lanes:
            gone = [name for name in lane.board.names if name not in names]
            acted = [name for name in gone if lane.board.acts(name)]
            for name in gone:
                lane.board.remove(name)
            for name in names:
                lane.board.add(name, Setting(scale=self.state.board[name].scale))
            if acted:
                self.compare.hint = f"{listed(acted)} was unloaded: column {lane.label} goes on without it"

    def add_lane(self, like: Lane) -> Lane | None:
        """Another column, with the mix of `like` to begin from; None, with a hint, when all are there."""
        lanes = self.compare.lanes
        free = [label for label in LABELS if not self.compare.lane(label)]
        if not free:
            self.compare.hint = f"{MOST_COLUMNS} columns are the most: x takes one away"
            return None
        lane = Lane(free[0], self._board(lambda name: Setting(like.board.acts(name), like.board[name].scale)))
        self.compare.lanes = sorted([*lanes, lane], key=lambda each: each.label)
        return lane

    def remove_lane(self, lane: Lane) -> None:
        if len(self.compare.lanes) <= 2:
            self.compare.hint = "two columns are the least that can be compared"
        else:
            self.compare.lanes.remove(lane)

    def take_chats_mix(self, lane: Lane) -> None:
        """The column gets the mix that the chat has now; undo brings its own back."""
        lane.board.take(self._board_of_chat().now)

    def toggle_invocation(self, lane: Lane) -> None:
        """The prompt ends with the invocation of the column's aLoRA, or again as the template has it."""
        adapters = self.state.adapters
        found = [adapters[use.name].invocation for use in lane.board.mix() if use.name in adapters and adapters[use.name].invocation]
        if not self.compare.opening and not found:
            self.compare.hint = f"no aLoRA acts in column {lane.label}: nothing to invoke"
        self.compare.opening = "" if self.compare.opening else found[0] if found else ""

    def _board_of_chat(self) -> MixBoard:
        board = self.state.board
        return self._board(lambda name: Setting(board.acts(name), board[name].scale))

    def _board(self, setting: Callable[[str], Setting]) -> MixBoard:
        board = MixBoard()
        for name in self.state.board.names:
            board.add(name, setting(name))
        return board

    # -- asking ---------------------------------------------------------------------------------
    def ask(self, text: str, system: str, sampling: p.Sampling) -> bool:
        """One prompt to all columns, to a pair of them by lot when it is blind; False, with a hint, when it cannot be asked now."""
        compare = self.compare
        columns = [Column(lane.label, lane.board.mix()) for lane in compare.lanes]
        if self._cannot(columns):
            return False
        if compare.blind:
            pairs = [pair for pair in combinations(columns, 2) if self._differ(*pair)]
            if not pairs:
                compare.hint = "all columns compute the same, so there is nothing to vote on: m sets another mix"
                return False
            columns = list(self._rng.choice(pairs))
        order = list(range(len(columns)))
        if compare.blind:
            self._rng.shuffle(order)
        self._give_up(compare.run)
        compare.run = self._start(self._prompt(text, system), text, columns, sampling, order)
        compare.run.blind = compare.run.hidden = compare.blind
        if not compare.blind and len({column.mix for column in columns}) == 1:
            compare.hint = "all columns have the same mix: m sets another one"
        self.count_votes()
        return True

    def sweep(self, lane: Lane, wish: str, text: str, system: str, sampling: p.Sampling) -> str:
        """Ask one adapter of a column at many scales, `NAME START:END:STEP`; a sentence when that cannot be."""
        name, _, scales = wish.strip().rpartition(" ")
        name = name.strip()
        if not name:
            return f"write the adapter and the scales: NAME START:END:STEP, for example {SWEPT_SCALES}"
        if name not in self.state.adapters:
            return f"{name} is not loaded; there are {listed(list(self.state.adapters), 6) or 'no adapters'}"
        try:
            found = parse_scales(scales)
        except ValueError as error:
            return str(error)
        others = tuple(use for use in lane.board.mix() if use.name != name)
        columns = sweep_columns(name, found, others)
        if self._cannot(columns):
            return self.compare.hint
        self._give_up(self.compare.sweep)
        self.compare.sweep = self._start(self._prompt(text, system), text, columns, sampling, range(len(columns)))
        self.compare.sweep.swept = name
        return ""

    def _cannot(self, columns: Sequence[Column]) -> bool:
        """Whether nothing can be asked now; the hint says why."""
        compare, state = self.compare, self.state
        missing = [(column.label, use.name) for column in columns for use in column.mix if use.name not in state.adapters]
        compare.hint = ""
        if state.engine == "gone":
            compare.hint = "the engine is gone: Ctrl+E starts it again"
        elif not state.model or state.engine == "loading":
            compare.hint = "there is no model yet: the prompt stays here until it is loaded"
        elif compare.active:
            compare.too_early("replies are being written: Esc stops them")
        elif missing:
            label, name = missing[0]
            why = state.failed.get(name, "it is not loaded now")
            compare.hint = f"column {label} has {name}: {why}. m changes its mix"
        return bool(compare.hint)

    def _prompt(self, text: str, system: str) -> p.Chat:
        history = history_of(self.state.items, system) if self.compare.after_chat else (p.Message("system", system),) if system else ()
        return p.Chat((*history, p.Message("user", text)) if text else history, self.compare.opening)

    def _start(self, prompt: p.Chat, text: str, columns: Sequence[Column], sampling: p.Sampling, order: Sequence[int]) -> Run:
        rows = [Row(self._new_id(), column) for column in columns]
        run = Run(prompt, text, Setup(self.state.model, (), tuple(columns), sampling), rows, tuple(order))
        run.made_of(self.state.adapters)
        self._send(p.GenerateTogether(tuple(p.Generate(row.request_id, prompt, row.column.mix, sampling) for row in rows)))
        return run

    def stop(self) -> bool:
        """Stop the replies that are being written; without any, the figures that are being computed; False when there is neither."""
        active = [row for run in self.compare.runs for row in run.rows if row.active]
        for row in active:
            self._send(p.Abort(row.request_id))
        scoring = [] if active else [run for run in self.compare.runs if run.scoring]
        for run in scoring:
            self._give_up(run)
        return bool(active or scoring)

    def _give_up(self, run: Run | None) -> None:
        """Nobody waits for the figures of `run` any more."""
        if run is not None and run.scoring:
            self._send(p.CancelScore(run.score_id))
            run.score_failed = "stopped before they were computed: ask again"

    def _differ(self, first: Column, second: Column) -> bool:
        return side_of(first.mix, self.state.adapters) != side_of(second.mix, self.state.adapters)

    # -- votes ----------------------------------------------------------------------------------
    def toggle_blind(self) -> None:
        """The next replies come without names; blind replies that have no vote yet get their names back."""
        compare = self.compare
        compare.blind = not compare.blind
        if compare.blind:
            pair = "" if len(compare.lanes) == 2 else " of two columns, drawn by lot,"
            compare.hint = f"blind: the next replies{pair} come without names; then, in a column, 1 left, 2 right, 3 a tie, 4 both bad"
        else:
            compare.hint = "names are shown" + ("; no vote was counted" if compare.run and compare.run.hidden else "")
            self._reveal()

    def vote(self, choice: Choice) -> None:
        """Count a vote of blind replies and show whose they were."""
        run = self.compare.run
        if run is None or not run.hidden:
            self.compare.hint = "votes are blind: b hides the names of the next replies"
        elif run.active:
            self.compare.too_early("vote when both replies are there")
        else:
            run.choice = choice
            turned = {"first": "second", "second": "first"}.get(choice, choice) if run.order[0] else choice
            run.tally, problem = self.votes.add(self._pair(run), turned)
            left, right = (run.rows[place].column.label for place in run.order)
            side = {"first": f"left, which is {left}", "second": f"right, which is {right}", "tie": "a tie", "bad": "both bad"}[choice]
            self._reveal()
            self.compare.hint = problem or f"your vote: {side}"

    def count_votes(self) -> None:
        """The votes of before between the run's first two columns."""
        if (run := self.compare.run) is not None:
            run.tally, problem = self.votes.counts(self._pair(run))
            self.compare.hint = problem or self.compare.hint

    def _pair(self, run: Run) -> Tally:
        adapters = {info.name: info for info in run.setup.adapters}
        return tally_of(run.setup.model, (run.setup.columns[0].mix, run.setup.columns[1].mix), adapters)

    def _reveal(self) -> None:
        if self.compare.run:
            self.compare.run.hidden = False

    # -- events ---------------------------------------------------------------------------------
    def receive(self, event: p.Event) -> None:
        """Fold an event in; ask for the figures when the last reply of a run has ended."""
        match event:
            case p.AdapterLoaded() | p.AdapterUnloaded() if self.compare.lanes:
                self.match_boards()
            case p.EngineFailed():
                self._lost("the engine stopped")
            case p.ModelLoaded():
                self._lost("another base was loaded")
            case p.Scored() | p.ScoreFailed():
                self._scored(event)
            case _ if (number := getattr(event, "request_id", None)) is not None:
                for run in self.compare.runs:
                    if (row := next((row for row in run.rows if row.request_id == number), None)) is not None:
                        self._happened(run, row, event)
        self.state.comparing = self.compare.active

    def _happened(self, run: Run, row: Row, event: p.Event) -> None:
        if isinstance(event, p.RequestStarted) and row.cache is None:
            run.made_of(self.state.adapters)
        row.take(event)
        if isinstance(event, p.RequestFinished | p.RequestFailed):
            self._ended(run)

    def _ended(self, run: Run) -> None:
        """When the last row of a run has ended: have its figures computed, unless what it was made with is no longer loaded."""
        if run.active:
            return
        self.compare.arrived()
        first = run.rows[0]
        if not run.whole and run.hidden:
            self.compare.hint = "a reply failed: there is nothing to vote on"
            self._reveal()
        if not first.ids:
            run.score_failed = "the first reply has no tokens"
            return
        if outdated := run.outdated(self.state.adapters):
            run.score_failed = f"{outdated} is not what it was when the replies began: ask again"
            return
        run.score_id = self._new_id()
        own = tuple(column.mix for column in run.setup.columns)
        self._send(p.Score(run.score_id, run.prompt, first.ids, own if run.swept else mixes_to_score(run.setup.columns)))

    def _scored(self, event: p.Scored | p.ScoreFailed) -> None:
        run = next((run for run in self.compare.runs if run.score_id == event.score_id), None)
        if run is None:
            return
        self.compare.arrived()
        if isinstance(event, p.ScoreFailed):
            run.score_failed = run.score_failed or event.message
        elif outdated := run.outdated(self.state.adapters):
            run.score_failed = f"{outdated} was read again while they were computed: ask again"
        else:
            run.scored, run.score_failed = event, ""

    def _lost(self, why: str) -> None:
        for run in self.compare.runs:
            for row in run.rows:
                if row.active:
                    after = f"after {counted(row.tokens, 'token')}; what it said is kept" if row.tokens else "before the first token"
                    row.phase, row.note = "lost", f"{why} {after}"
            if run.scoring or not run.score_id:
                run.score_failed = run.score_failed or f"{clean_line(why)}: ask again"
        self._reveal()

    def prompt_text(self, system: str) -> str:
        """What the prompt is put after and ends with, for the screen's first line; "" when it stands alone."""
        compare = self.compare
        chat = len(history_of(self.state.items, "")) if compare.after_chat else 0
        parts = [f"after {counted(chat, 'message')} of the chat" if compare.after_chat else "", "system message" if system else "",
                 f"⚑ ends with {clean_line(compare.opening, 30)}" if compare.opening else ""]
        return " · ".join(filter(None, parts))

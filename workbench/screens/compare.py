"""F3: one prompt to two to four mixes side by side."""
from __future__ import annotations

from time import monotonic

from textual import events, on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from ..commands import run_command
from ..compare_control import SWEPT_SCALES
from ..compare_files import export
from ..compare_state import MOST_COLUMNS, Lane, Run
from ..compare_text import gone_text
from ..control import MAX_PROMPT, Control
from ..header import header_line
from ..keys import bindings
from ..panels.figures import Figures
from ..styles import QUIET
from ..text import clean, clean_line, size_text
from ..transcript import Turn
from ..widgets.adapter_list import AdapterList
from ..widgets.ask import Ask, AskField
from ..widgets.compare_columns import Columns, CompareColumn
from ..widgets.key_line import KeyLine
from ..widgets.mix_editor import MixEditor
from ..widgets.prompt import Prompt
from ..widgets.token_view import TokenView
from .steady import KeptPane
from .sweep import SweepScreen

JUST_ENDED_S = 0.7
"""Esc so soon after the replies ended was meant to stop them: it does not leave"""


class CompareScreen(KeptPane, Screen):
    """Columns, what is told of them, and the prompt for all. The comparison goes on while the chat is on the screen."""

    BINDINGS = bindings("compare")
    CSS_PATH = "../compare.tcss"
    AUTO_FOCUS = "#prompt"
    PALETTE_PANES = HELP_PANES = ("compare", "columns", "mix", "tokens", "prompt", "app")
    HORIZONTAL_BREAKPOINTS = [(0, "-nano"), (20, "-narrow"), (110, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (10, "-low"), (20, "-mid"), (32, "-tall")]

    def __init__(self, control: Control) -> None:
        super().__init__(id="compare-screen")
        self._control = control
        self._comparing = control.comparing
        self._comparing.open()
        self._writing = False
        self._ended_at = 0.0
        self._keys_told = (False, False, False)

    def compose(self) -> ComposeResult:
        yield Static("terminal too small to compare: at least 20×10", id="too-small", markup=False)
        yield Static("", id="header", markup=False)
        yield Static("", id="compare-title", markup=False)
        yield Columns(self._control, self._want)
        yield TokenView()
        yield MixEditor(self._control)
        with VerticalScroll(id="compare-figures", can_focus=False):
            yield Figures("figures")
        yield Ask()
        yield Static("", id="hint", markup=False)
        yield Prompt(lambda: self._control.state.engine == "gone")
        yield KeyLine()

    def on_mount(self) -> None:
        compare, prompt = self._comparing.compare, self.query_one(Prompt)
        if compare.draft:
            prompt.put_back(clean(compare.draft))
        elif offered := self._offered():
            prompt.put_back(offered)
            prompt.select_all()

    def _offered(self) -> str:
        """What the prompt holds, all of it selected, before anything was asked here."""
        return "" if self._comparing.compare.run else clean(self._last_asked())

    def _last_asked(self) -> str:
        """The last question of the chat: the likeliest to be compared."""
        run = self._comparing.compare.run
        return run.asked if run else next((item.asked for item in reversed(self._control.state.items) if isinstance(item, Turn)), "")

    def on_screen_resume(self) -> None:
        self.call_after_refresh(self.show)

    # -- drawing --------------------------------------------------------------------------------
    async def show(self) -> None:
        """Bring everything to the comparison."""
        if not self._has_panes():
            return
        compare, state = self._comparing.compare, self._control.state
        self._comparing.match_boards()
        self._show_busy()
        self.query_one("#header", Static).update(header_line(state, self.size.width), layout=False)
        tokens = self.query_one(TokenView)
        if tokens.display and (not compare.run or not compare.run.scored):
            self._to_columns()
        columns = self.query_one(Columns)
        columns.show()
        self.query_one("#compare-title", Static).update(self._title(), layout=False)
        self.query_one(MixEditor).show()
        other = "" if self.has_class("-tall") else columns.sides[columns.other].label
        self.query_one(Figures).show(self._control, tokens if tokens.display else None, other)
        hint = gone_text(state.items) if state.engine == "gone" else compare.hint
        shown = self.query_one("#hint", Static)
        shown.display = bool(hint)
        shown.update(Content(clean_line(hint, 300)))

    def _has_panes(self) -> bool:
        """False before they are made and while the app is leaving; a redraw that was asked for may fall there."""
        drawn = self.query(".column-title, .column-text, .column-lines, .token-title, .token-text, #mix-title, #hint, #header, #prompt, "
                           "AskField, AdapterList, Figures, KeyLine")
        return len(drawn) == 3 * MOST_COLUMNS + 10

    def _title(self) -> Content:
        compare, sampling = self._comparing.compare, self._control.sampling
        warm = f"temperature {sampling.temperature:g}, the same noise for all: seed {sampling.seed}"
        columns = self.query_one(Columns)
        hidden = len(columns.sides) - len(columns.shown()) if columns.sides else 0
        parts = [f"{len(compare.lanes)} columns" + (f", {hidden} more by Tab" if hidden else ""),
                 warm if sampling.temperature > 0 else "greedy", "blind" if compare.blind else "",
                 "" if columns.linked else "scrolling apart", self._comparing.prompt_text(self._control.system)]
        asked = clean_line(f"  “{compare.run.asked}”", max(self.size.width // 2, 20)) if compare.run else ""
        return Content.assemble((" COMPARE", "bold $accent"), (asked, "bold"), ("  " + " · ".join(filter(None, parts)), QUIET))

    def _show_busy(self) -> None:
        """What Esc does, and which keys mean something, in the footer."""
        if (writing := self._control.state.comparing) != self._writing:
            self._writing, self._ended_at = writing, 0.0 if writing else monotonic()
            if not writing:
                self.set_timer(JUST_ENDED_S, self._show_busy)
        if (told := (self._hidden, self._comparing.compare.blind, self._stops)) != self._keys_told:
            self._keys_told = told
            self.refresh_bindings()

    @property
    def _hidden(self) -> bool:
        run = self._comparing.compare.run
        return bool(run and run.hidden)

    @property
    def _just_ended(self) -> bool:
        return monotonic() - self._ended_at < JUST_ENDED_S

    @property
    def _over(self) -> bool:
        """Whether the mix or the tokens lie over the columns."""
        return self.query_one(TokenView).display or self.query_one(MixEditor).display

    @property
    def _stops(self) -> bool:
        """Whether Esc stops something: figures only where it has nothing to close."""
        compare = self._comparing.compare
        return compare.active or self._just_ended or not self._over and any(run.scoring for run in compare.runs)

    @on(Columns.Changed)
    @on(MixEditor.Changed)
    async def _changed(self) -> None:
        await self.show()

    @on(TokenView.Moved)
    async def _token_moved(self) -> None:
        self.query_one(TokenView).show(self._comparing.compare.run)
        await self.show()

    # -- the prompt -----------------------------------------------------------------------------
    @on(Prompt.Sent)
    async def _sent(self, event: Prompt.Sent) -> None:
        prompt = self.query_one(Prompt)
        if event.text.startswith("/"):
            done = self._command(event.text.strip())
        else:
            done = self._ask(event.text)
        (prompt.taken if done else prompt.put_back)(event.text)
        await self.show()

    @on(Prompt.TooLong)
    async def _too_long(self, event: Prompt.TooLong) -> None:
        self._hint(f"not pasted: {size_text(event.size)} of text, a prompt holds {size_text(MAX_PROMPT)}")
        await self.show()

    def _ask(self, text: str) -> bool:
        done = self._comparing.ask(text, self._control.system, self._control.sampling)
        if done:
            self._to_columns()
        return done

    def _command(self, line: str) -> bool:
        try:
            self._hint(run_command(self._control, line))
        except ValueError as error:
            self._hint(str(error))
            return False
        return True

    def _hint(self, text: str) -> None:
        self._comparing.compare.hint = text

    async def action_again(self) -> None:
        run = self._comparing.compare.run
        if run is None:
            self._hint("nothing was asked yet")
        else:
            if run.setup.sampling.temperature > 0 and self._control.sampling == run.setup.sampling and not self._control.state.comparing:
                self._control.set_sampling(seed=self._control.sampling.seed + 1)
            self._ask(run.asked)
        await self.show()

    # -- keys of the columns --------------------------------------------------------------------
    def _want(self, what: str) -> None:
        lane, run = self._lane(), self._comparing.compare.run
        self._hint("")
        if run and run.hidden:
            self._hint("vote first: 1 left, 2 right, 3 a tie, 4 both bad; b shows the names without a vote")
        elif what == "tokens":
            self._open_tokens(run)
        elif what == "export":
            self._export(run)
        elif what == "last sweep":
            self._open_sweep()
        elif lane is not None:
            self._of_lane(what, lane)

    def _of_lane(self, what: str, lane: Lane) -> None:
        compare, columns = self._comparing.compare, self.query_one(Columns)
        if what == "mix":
            self.query_one(MixEditor).edit(lane)
            self._layout()
        elif what == "add":
            if added := self._comparing.add_lane(lane):
                columns.focus_side(compare.lanes.index(added))
                self.query_one(MixEditor).edit(added)
                self._layout()
        elif what == "remove":
            self._comparing.remove_lane(lane)
            columns.show()  # at once: the next key is for a column that is still there
        elif what == "chat":
            self._comparing.take_chats_mix(lane)
        elif what == "history":
            compare.after_chat = not compare.after_chat
        elif what == "invocation":
            self._comparing.toggle_invocation(lane)
        elif what == "sweep":
            self._ask_sweep(lane)

    def _ask_sweep(self, lane: Lane) -> None:
        mix = lane.board.mix()
        name = mix[0].name if mix else next(iter(self._control.state.adapters), "")
        text = self.query_one(Prompt).text.strip() or self._last_asked()
        if not text:
            self._hint("type the prompt of the sweep first")
            return

        def take(wish: str) -> str | None:
            problem = self._comparing.sweep(lane, wish, text, self._control.system, self._control.sampling)
            if not problem:
                self.call_after_refresh(self._open_sweep)
            return problem or None

        beside = "beside the rest of its mix" if len(mix) > 1 else "alone"
        self.query_one(Ask).ask(f"sweep in column {lane.label}, {beside}: NAME START:END:STEP", f"{name} {SWEPT_SCALES}", take)

    def _export(self, run: Run | None) -> None:
        said = export(run, self._control.state.clock())
        (self._comparing.compare.too_early if run and (run.active or run.scoring) else self._hint)(said)

    def _open_sweep(self) -> None:
        if self._comparing.compare.sweep is None:
            self._hint("no sweep was made yet: w makes one")
        elif self.app.screen is self:
            self.app.push_screen(SweepScreen(self._control))

    def _open_tokens(self, run: Run | None) -> None:
        if run is None or run.scored is None or not run.scored.tokens:
            if run is None or not run.score_failed:
                self._comparing.compare.too_early("there are no figures yet")
            else:
                self._hint(f"no figures: {run.score_failed}")
            return
        tokens, columns = self.query_one(TokenView), self.query_one(Columns)
        label = columns.sides[columns.other].label
        tokens.other = next((i for i, column in enumerate(run.setup.columns) if i and column.label == label), 1)
        tokens.display, columns.display = True, False
        self.set_focus(tokens)
        self._layout()
        self.call_after_refresh(tokens.show, run)

    @on(TokenView.Closed)
    async def action_close_view(self) -> None:
        self._to_columns()
        self.query_one(Columns).focus_side(self.query_one(Columns).current)
        await self.show()

    def _to_columns(self) -> None:
        """The columns and the figures are seen again, not the tokens nor the mix."""
        inside = isinstance(self.focused, TokenView | AdapterList)
        self.query_one(TokenView).display = self.query_one(MixEditor).display = False
        self.query_one(Columns).display = True
        self._layout()
        if inside:
            self.query_one(Columns).focus_side(self.query_one(Columns).current)

    def _layout(self) -> None:
        self.query_one("#compare-figures").display = not self.query_one(MixEditor).display
        self.set_class(self.query_one(TokenView).display, "-tokens")
        self.refresh_bindings()

    def _lane(self) -> Lane | None:
        """The lane of the current column."""
        columns = self.query_one(Columns)
        return self._comparing.compare.lane(columns.sides[columns.current].label) if columns.sides else None

    # -- keys of the screen ---------------------------------------------------------------------
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Esc stops, else closes what lies over the columns, else leaves; in a field it is the field's."""
        if action in ("stop", "close_view", "back", "pane") and isinstance(self.focused, AskField):
            return False
        if action not in ("stop", "close_view", "back") or not self.is_mounted or not self.query(MixEditor):
            return True
        stops, over = self._stops, self._over
        return {"stop": stops, "close_view": not stops and over}.get(action, not stops and not over)

    def footer_tells(self, action: str) -> bool:
        """Whether the footer has the key of an action: of blind replies that are not voted on yet those that vote."""
        if action == "other":
            return len(self._comparing.compare.lanes) > 2
        return not action.startswith(("want", "difference") if self._hidden else "vote")

    def action_stop(self) -> None:
        if self._comparing.compare.active or not self._just_ended:  # else it was meant for the replies: their figures may come
            self._comparing.stop()

    def action_back(self) -> None:
        text = self.query_one(Prompt).text
        compare = self._comparing.compare
        compare.draft, compare.hint = "" if text == self._offered() else text, ""
        self.dismiss()

    action_leave = action_back

    def action_pane(self, by: int) -> None:
        """From the prompt to what has the keys above it, column by column, and back."""
        if not self._has_panes():  # a key right behind F3
            self.call_after_refresh(self.action_pane, by)
            return
        over: list[Widget] = [widget for widget in (self.query_one(TokenView), self.query_one(MixEditor)) if widget.display]
        prompt, columns = self.query_one(Prompt), self.query_one(Columns)
        if over:
            target = over[0] if isinstance(over[0], TokenView) else over[0].query_one(AdapterList)
            self.set_focus(target if self.focused is prompt else prompt)
            return
        places = len(columns.sides)
        here = columns.current if isinstance(self.focused, CompareColumn) else places
        there = (here + by) % (places + 1)
        if there == places:
            self.set_focus(prompt)
        else:
            columns.focus_side(there)

    def on_key(self, event: events.Key) -> None:
        """What is typed before the prompt has the focus belongs to it."""
        if self.focused is None and event.is_printable and event.character and self.query(Prompt):
            event.stop()
            event.prevent_default()
            self.query_one(Prompt).insert(event.character)

    def pane(self) -> str:
        """The pane that has the focus, for F1."""
        kinds = {TokenView: "tokens", AdapterList: "mix", CompareColumn: "columns", Prompt: "prompt"}
        return next((name for kind, name in kinds.items() if isinstance(self.focused, kind)), "compare")

    def action_target(self, pane: str) -> DOMNode | None:
        """The node that carries out the actions of a pane; None for one that is not there now."""
        if pane in ("mix", "tokens"):
            widget = self.query_one(MixEditor if pane == "mix" else TokenView)
            return widget if widget.display else None
        return {"compare": self, "columns": self.query_one(Columns), "prompt": self.query_one(Prompt)}.get(pane, self.app)

    def stop_here(self) -> bool:
        """Ctrl+C stops what this screen shows; False when nothing runs."""
        return self._comparing.stop()

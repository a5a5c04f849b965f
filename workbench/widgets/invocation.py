"""The field for an aLoRA's invocation: its tokens as the base cuts them, and whether the prompt has it, while it is typed."""
from __future__ import annotations

from textual import events, on
from textual.app import ComposeResult
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Input, Static

from ..arguments import escape, unescape
from ..control import Control
from ..keys import bindings
from ..styles import QUIET
from ..text import clean_line, counted
from ..token_text import tokens_content
from .ask import Ask, AskField

TYPING_S = 0.15
"""after so long without a key the engine is asked"""


class InvocationField(AskField):
    BINDINGS = bindings("invocation")

    def action_in_reply(self) -> None:
        self.parent.switch_in_reply()


class InvocationEditor(Ask):
    """`open` shows it. `draft` is the message that is being typed in the prompt, which the invocation is looked for in too."""

    FIELD = InvocationField

    def __init__(self, control: Control) -> None:
        super().__init__("invocation")
        self._control = control
        self._draft = ""
        self._in_reply = False
        self._timer: Timer | None = None
        self._asked_for = ""
        self._shown: tuple[Content, ...] = ()

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield Static("", classes="invocation-line tokens", markup=False)
        yield Static("", classes="invocation-line found", markup=False)
        yield Static("", classes="invocation-line switch", markup=False)

    def open(self, name: str, draft: str) -> None:
        """Edit the invocation of the adapter `name`, which is loaded."""
        info = self._control.state.adapters[name]
        self._draft, self._in_reply = draft, info.invocation_in_reply

        def take(text: str) -> None:
            self._control.set_invocation(name, unescape(text), self._in_reply)

        self.ask(f"invocation of {name} (empty: plain LoRA)", escape(info.invocation), take)
        self._look()

    def show(self) -> None:
        """Bring the lines to the engine's latest answer."""
        if not self.display:
            return
        lines = (*self._lines(), Content(f"^t [{'x' if self._in_reply else ' '}] also where it is generated"))
        if lines != self._shown:
            self._shown = lines
            for name, line in zip(("tokens", "found", "switch"), lines, strict=True):
                self.query_one(f".{name}", Static).update(line)

    def switch_in_reply(self) -> None:
        """Whether it also begins to act where the model itself writes the invocation."""
        self._in_reply = not self._in_reply
        self.show()

    @on(events.Click, ".switch")
    def _switch_clicked(self) -> None:
        self.switch_in_reply()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display and event.value != self._asked_for:
            self._control.state.tokenized = None
            self._control.state.asked += 1  # what is under way is of another text
            if self._timer:
                self._timer.stop()
            self._timer = self.set_timer(TYPING_S, self._look)
            self.show()

    def _look(self) -> None:
        self._asked_for = self.query_one(Input).value
        if text := unescape(self._asked_for):
            self._control.look_at_invocation(text, self._draft)
        self.show()

    def _lines(self) -> tuple[Content, Content]:
        state = self._control.state
        answer = state.tokenized
        if not self.query_one(Input).value:
            return Content("no invocation: it acts on every token"), Content("")
        if state.engine == "gone":
            return Content("the engine is gone: Ctrl+E starts it again"), Content("")
        if answer is None:
            return Content("…"), Content("")
        if not answer.ids:
            return Content.assemble((clean_line(answer.detail, 300), "$text-error")), Content("")
        ids = " ".join(map(str, answer.ids[:24])) + (" …" if len(answer.ids) > 24 else "")
        tokens = Content.assemble(f"{counted(len(answer.ids), 'token')}  ", tokens_content(answer.texts), (f"  {ids}", QUIET))
        if answer.found:
            return tokens, Content.assemble((f"✓ found in this prompt, at token {answer.start}", "$text-success"))
        if not answer.detail:
            return tokens, Content("no chat and no message yet to look for it in")
        return tokens, Content.assemble((clean_line(f"✗ not found in this prompt: {answer.detail}", 400), "$text-warning"))

"""A turn of the chat: what the person said, one version of the reply, and how it was made."""
from __future__ import annotations

import asyncio

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Static

from ..mixboard import mix_text
from ..reply_facts import meter_lines
from ..text import clean_line
from ..token_text import marked
from ..transcript import Turn
from ..widgets.reply_text import ReplyText
from .item import ItemView


class TurnView(ItemView):
    """What the person said, one version of the reply, and its meter."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn)
        self._turn = turn
        self._seen: tuple = ()
        self._marked = turn.version.activations
        self._final = False
        self._writing = asyncio.Lock()

    def compose(self) -> ComposeResult:
        if self._turn.asked:
            yield Static(Content("You"), classes="who", markup=False)
            yield Static(marked(self._turn.asked, self._turn.version.activations), classes="asked", markup=False)
        yield Static("", classes="who reply-head", markup=False)
        yield ReplyText()
        yield Static("", classes="meter", markup=False)

    async def show(self) -> None:
        async with self._writing:  # keys and ticks may ask at once
            await self._show()

    async def _show(self) -> None:
        version = self._turn.version
        seen = (self._turn.shown, len(self._turn.versions), version.phase, len(version.text), version.tokens, version.mix_now,
                len(version.splices), version.splices[-1:], len(version.fired), version.note, version.activations, version.cache,
                version.preempted, version.again, version.ambiguous)
        if seen == self._seen:
            return
        changed_version = self._seen[:1] != seen[:1]
        self._seen = seen
        if self._turn.asked and (changed_version or version.activations != self._marked):
            self._marked = version.activations
            self.query_one(".asked", Static).update(marked(self._turn.asked, version.activations))
        self.query_one(".reply-head", Static).update(self._head())
        self.query_one(".meter", Static).update(Content("\n").join(meter_lines(version)))
        if version.active:
            self._final = False
            await self.query_one(ReplyText).show(version)
        elif not self._final or changed_version:
            self._final = True
            await self.query_one(ReplyText).finish(version)

    def _head(self) -> Content:
        turn, version = self._turn, self._turn.version
        made_by = mix_text(version.mix, version.marks)
        if any(splice.change != "finish" for splice in version.splices):
            made_by += f" → {mix_text(version.mix_now, version.marks)}"
        if version.invoked:
            made_by = f"⚑ {made_by} was invoked on the chat; what it says is not part of it"
        count = f"   ◂ {turn.shown + 1}/{len(turn.versions)} ▸" if len(turn.versions) > 1 else ""
        return Content.assemble((clean_line(made_by, 300), "bold"), (count, "$accent"))

    def action_older(self) -> None:
        self._step(-1)

    def action_newer(self) -> None:
        self._step(1)

    def _step(self, by: int) -> None:
        if self._turn.step(by):
            self.run_worker(self.show())

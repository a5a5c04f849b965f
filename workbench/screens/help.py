"""F1: the keys of the focused pane, then those that work everywhere."""
from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from ..keys import PANE_TITLES, help_lines
from .steady import SteadySize

MAIN_PANES = ("bench", "app", "prompt", "adapters", "reply")
WORDS = (
    ("mix", "The adapters that act, each with its scale: 1 as trained, 0 off, negative pushes the other way"),
    ("G0, G1, ...", "Slots: places on the device. An adapter must lie in one to act; the one unused longest makes room"),
    ("pages, p", "On a GPU, memory for 16 rank rows of all layers; an adapter in a slot has some of each kind of linear that it changes"),
    ("host", "Adapters kept in memory outside the slots; disk: to be read from its file again"),
    ("⚑ aLoRA", "An adapter that acts only behind its invocation, a text at the end of the prompt: v asks for it"),
    ("▪  S  !", "In the list: pinned; solo; there is a note on it in the details"),
    ("‖ΔW‖", "How far the adapter moves the weights of each layer, first to last"),
    ("KL", "How differently the base and the adapter would go on, in nats a token: 0 is alike, 1 is far apart"),
    ("KL(A‖B)", "On the compare screen: how differently the mixes of A and B would go on, before each token of A's reply"),
    ("[40–89%]", "Wilson's interval: where the share of wins lies with 95 % confidence; ties and both bad are left out"),
    ("KV, blocks", "Memory for keys and values, 16 tokens a block. Each is known by its tokens and by what acted on them"),
    ("prefix, hit", "Tokens of a prompt whose keys and values were there already; behind it stands why not more"),
    ("AAABB·cc", "The map of KV memory, a letter a mix: upper case a reply holds it, reversed several do, lower case kept for later"),
    ("splice", "A change of the mix acts from the next token; recompute: all so far is computed again under it; finish: after the reply"),
    ("paused", "KV memory was full: the reply gave its blocks back, waited, and went on with the same tokens"),
    ("shrink, expand", "The two products that adapters add to a step: x A, then (x A) B"),
    ("31+1 tok", "In a step: tokens of prompts that are read, and tokens that replies continue from"),
    ("trace", "One step as torch's profiler recorded it. share: of the whole step; beside: while another stream of the device was busy"),
    ("TTFT", "Time from Enter to the first token"),
)


class HelpScreen(SteadySize, ModalScreen[None]):
    """Lists keys with what they do; Esc closes it."""

    BINDINGS = [Binding("escape,f1,q", "close", "Close", id="help.close", tooltip="Close the help")]

    def __init__(self, pane: str, others: Sequence[str] = MAIN_PANES) -> None:
        super().__init__()
        self._panes = [pane, *(other for other in others if other != pane)]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            for pane in self._panes:
                yield Static(Content.assemble((PANE_TITLES[pane], "bold $accent")), classes="help-title", markup=False)
                for keys, text in help_lines(pane):
                    yield from self._line(keys, text)

            yield Static(Content.assemble(("Words", "bold $accent")), classes="help-title", markup=False)
            for word, text in WORDS:
                yield from self._line(word, text)

    def _line(self, left: str, right: str) -> ComposeResult:
        with Horizontal(classes="help-line"):
            yield Static(Content(left), classes="help-keys", markup=False)
            yield Static(Content(right), classes="help-text", markup=False)

    def action_close(self) -> None:
        self.dismiss()

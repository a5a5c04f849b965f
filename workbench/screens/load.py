"""The load screen: choose a base model and how to load it, see it load, see why it did not.

The screen knows no engine: it posts `LoadScreen.Open` and `LoadScreen.CancelLoad`, and the app hands it the
engine's events of the load by `engine_event`.
"""
from __future__ import annotations

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.dom import DOMNode
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input, OptionList, Select, Static
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from ...engine.protocol import Event, LoadModel, ModelFailed, ModelLoaded, ModelLoading
from .. import engine_tools
from ..keys import bindings
from ..load_choices import Choice, choices, load_command, memory_line, size_input, why_not_loaded
from ..model_scan import Found, find_models, places
from ..paste import pasted_paths
from ..paths import settings_file
from ..settings import read_settings
from ..text import clean, clean_line
from ..widgets.ask import MOST_CHARACTERS
from ..widgets.keys_in_order import LineField
from ..widgets.load_progress import progress_text
from .steady import SteadySize

FIELDS = {"context": "Context (0: most)", "slots": "Slots", "host_cache": "Host cache"}


class ModelOption(Option):
    """A line of the list that knows its model: an event about it may come when the list has changed."""

    def __init__(self, choice: Choice, width: int) -> None:
        super().__init__(Content(choice.line(width)))
        self.path = choice.path


class LoadScreen(SteadySize, Screen[None]):
    """`load` gives the options to begin with; `problem`, a load that failed, is shown at once. Leaves by itself when a model is loaded."""

    BINDINGS = bindings("load")
    PALETTE_PANES = ("load", "app")
    CSS = """
    LoadScreen { layout: vertical; padding: 0 1; }
    LoadScreen #title { text-style: bold; height: 1; }
    LoadScreen #path { margin: 1 0 0 0; }
    LoadScreen #models { height: 1fr; min-height: 4; }
    LoadScreen #options { height: 2; margin: 1 0 0 0; }
    LoadScreen .option { width: 1fr; max-width: 22; height: 2; margin-right: 1; }
    LoadScreen .option-label { height: 1; color: $text-muted; }
    LoadScreen .fact { height: auto; max-height: 4; }
    LoadScreen #problem { color: $text-error; max-height: 8; }
    LoadScreen #keys { height: 1; color: $text-muted; }
    """

    class Open(Message):
        """Load this."""

        def __init__(self, load: LoadModel) -> None:
            super().__init__()
            self.load = load

    class CancelLoad(Message):
        """Stop the load in progress."""

    def __init__(self, load: LoadModel | None = None, problem: str = "") -> None:
        super().__init__()
        self._last = load or LoadModel()
        self._problem = problem
        self._loading: LoadModel | None = None
        self._found: list[Found] = []
        self._scanning = ""
        self._shown: list[Choice] = []
        self._header_of: str | None = None
        self._plan: dict | str | None = None
        """what the header of the highlighted model says, or why it cannot be loaded"""

    def compose(self) -> ComposeResult:
        yield Static("Open a base model", id="title", markup=False)
        yield LineField(placeholder="type to filter, or paste the path of a GGUF file or a Hugging Face folder", id="path",
                        max_length=MOST_CHARACTERS)
        yield OptionList(id="models", markup=False)
        with Horizontal(id="options"):
            yield from self._pick("device", "Device", ("auto", "cpu", "cuda"), self._last.device)
            yield from self._pick("dtype", "Number format", ("auto", "fp32", "bf16", "fp16", "packed"), self._last.dtype)
            yield from self._pick("weights", "Weights", ("auto", "dense", "packed"), self._last.weights)
            cache = size_input(self._last.host_cache_bytes)
            for (name, label), value in zip(FIELDS.items(), (str(self._last.context), str(self._last.slots), cache), strict=True):
                with Vertical(classes="option"):
                    yield Static(label, classes="option-label", markup=False)
                    yield LineField(value, id=name, compact=True, max_length=40)
        yield Static(id="memory", classes="fact", markup=False)
        yield Static(id="progress", classes="fact", markup=False)
        yield Static(id="problem", classes="fact", markup=False)
        yield Static(id="keys", markup=False)

    def _pick(self, name: str, label: str, words: tuple[str, ...], value: str) -> ComposeResult:
        with Vertical(classes="option"):
            yield Static(label, classes="option-label", markup=False)
            yield Select([(word, word) for word in words], value=value, allow_blank=False, id=name, compact=True)

    def on_mount(self) -> None:
        self._settings, damaged = read_settings(settings_file())
        self._say(self._problem or damaged)
        self._show_keys()
        self._fill()
        self.query_one("#path").focus()
        self.action_rescan()

    # -- what the engine says ---------------------------------------------------------------------
    def engine_event(self, event: Event) -> None:
        match event:
            case ModelLoading():
                self.query_one("#progress", Static).update(Content(progress_text(event, self.size.width - 4)))
            case ModelFailed():
                self._end_load(why_not_loaded(event))
            case ModelLoaded():
                self._end_load("")
                self.dismiss(None)

    def _end_load(self, problem: str) -> None:
        self._loading = None
        self.query_one("#progress", Static).update("")
        self._say(problem)
        self._show_keys()

    # -- what the person does -----------------------------------------------------------------------
    @on(Input.Changed, "#path")
    def _filter(self) -> None:
        self._fill()
        if path := self._typed_path():
            self._look_at(path)
        elif not self._shown:  # the facts of the model before would stand under other words
            self._header_of = self._plan = None
            self.query_one("#memory", Static).update("no such path, and no model here has these words in its name")

    @on(Input.Submitted, "#path")
    def _typed(self, event: Input.Submitted) -> None:
        paths, problem = pasted_paths(event.value)
        if len(paths) == 1:
            self._open(str(paths[0]))
        elif paths:
            self._say(f"{len(paths)} paths were given; one model can be opened at a time")
        elif self._shown:
            self._open(self._shown[self.query_one("#models", OptionList).highlighted or 0].path)
        elif "/" in event.value:
            self._say(problem)
        else:
            self._say("no model here has these words in its name; paste the path of a GGUF file or of a Hugging Face folder")

    @on(OptionList.OptionSelected, "#models")
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self._open(event.option.path)

    @on(OptionList.OptionHighlighted, "#models")
    def _looked_at(self, event: OptionList.OptionHighlighted) -> None:
        typed = "" if event.option_list.has_focus else self._typed_path()
        self._look_at(typed or event.option.path)

    def _typed_path(self) -> str:
        """The one path that stands in the field, "" if there is none or more."""
        text = self.query_one("#path", Input).value.strip()
        paths = pasted_paths(text)[0] if text else []
        return str(paths[0]) if len(paths) == 1 else ""

    def _look_at(self, path: str) -> None:
        """Have the header read, if it is not the one that is shown."""
        if path != self._header_of:
            self._header_of = path
            self.query_one("#memory", Static).update("reading the header")
            self._read_header(path)

    @on(Input.Changed, "#context, #slots, #host_cache")
    @on(Select.Changed)
    def _options_changed(self) -> None:
        self._show_memory()

    @on(Input.Submitted, "#context, #slots, #host_cache")
    def _options_done(self) -> None:
        self.query_one("#models").focus()

    def action_list(self) -> None:
        self.query_one("#models").focus()

    def action_back(self) -> None:
        if self._loading:
            self.post_message(self.CancelLoad())
            self.query_one("#progress", Static).update("stopping the load")
        else:
            self.dismiss(None)

    def action_rescan(self) -> None:
        self._found = []
        self._scan()

    def _open(self, path: str) -> None:
        if self._loading:
            self._say("a model is loading; Esc stops it")
            return
        try:
            self._loading = load_command(path or None, self._options())
        except ValueError as error:
            self._say(str(error))
            return
        self._say("")
        self.query_one("#progress", Static).update("asking the engine")
        self._show_keys()
        self.post_message(self.Open(self._loading))

    def _options(self) -> dict[str, str]:
        picks = {name: str(self.query_one(f"#{name}", Select).value) for name in ("device", "dtype", "weights")}
        return picks | {name: self.query_one(f"#{name}", Input).value for name in FIELDS}

    def action_target(self, pane: str) -> DOMNode:
        """The node that carries out the actions of a pane, for the palette."""
        return self if pane == "load" else self.app

    # -- the list -------------------------------------------------------------------------------------
    def _fill(self) -> None:
        words = "" if self._typed_path() else self.query_one("#path", Input).value
        self._shown = choices(self._settings.recent, self._found, words)
        models = self.query_one("#models", OptionList)
        models.clear_options()
        models.add_options([ModelOption(choice, self.size.width - 6) for choice in self._shown])
        if self._shown:
            models.highlighted = next((i for i, choice in enumerate(self._shown) if choice.path == self._header_of), 0)
        models.border_subtitle = Content(self._scanning)

    @work(thread=True, exclusive=True, group="scan", exit_on_error=False)
    def _scan(self) -> None:
        worker = get_current_worker()
        for place in places():
            self.app.call_from_thread(self._scanned, [], f"looking in {place[0]}")
            batch = list(find_models([place]))
            if worker.is_cancelled:
                return
            self.app.call_from_thread(self._scanned, batch, "")

    def _scanned(self, batch: list[Found], scanning: str) -> None:
        known = {found.path.resolve() for found in self._found}
        self._found += [found for found in batch if found.path.resolve() not in known]
        self._scanning = clean_line(scanning)
        if self.is_mounted:
            self._fill()

    @work(thread=True, exclusive=True, group="header", exit_on_error=False)
    def _read_header(self, path: str) -> None:
        try:
            plan: dict | str = engine_tools.ask("plan", *([path] if path else []))
        except engine_tools.Failed as failed:
            plan = str(failed)
        if not get_current_worker().is_cancelled:
            self.app.call_from_thread(self._planned, path, plan)

    def _planned(self, path: str, plan: dict | str) -> None:
        if path != self._header_of:
            return
        self._plan = plan
        self._show_memory()

    def _show_memory(self) -> None:
        if self._plan and self.is_mounted:
            line = self._plan if isinstance(self._plan, str) else memory_line(self._plan, self._options())
            self.query_one("#memory", Static).update(Content(clean(line)))

    def _say(self, problem: str) -> None:
        self.query_one("#problem", Static).update(Content(f"✗ {clean(problem)}" if problem else ""))

    def _show_keys(self) -> None:
        back = "esc stop the load" if self._loading else "esc back"
        self.query_one("#keys", Static).update(Content(f"enter open   ↓ list   tab options   f5 look again   {back}"))

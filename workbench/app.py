"""The application: drains the engine's events into the store and has the screens show it. `chat` is the file of a chat to go on with."""
from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from textual import events, on
from textual.app import App, SystemCommand
from textual.await_complete import AwaitComplete
from textual.dom import DOMNode
from textual.driver import Driver
from textual.screen import Screen

from ..engine.protocol import Event, LoadModel, ModelFailed, ModelLoaded, ModelLoading
from .backends.backend import Backend
from .control import Control
from .keys import KEYS, PANE_TITLES, bindings
from .screens.bench import BenchScreen
from .screens.steady import Palette, goes_by_no_lines
from .state import BenchState, StartAdapter
from .text import clean

if TYPE_CHECKING:
    from .screens.load import LoadScreen

TICK = 0.05
FRAME_CPU, FRAME_GPU = 4, 2
"""ticks between two redraws of a part: a model on the CPU shares it with the screen"""
AFTER_KEY_S, TYPING_S = 0.06, 0.25
"""while a person types, redraws fall right behind a key: later the next key might wait for one"""
EVENTS_A_TICK = 2000
SLOW_TICKS = 20
"""ticks after which the screen is redrawn though nothing happened: ages grow"""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (ModelLoading, ModelLoaded, ModelFailed)


class BenchApp(App[None]):
    """`inbox` is filled by the backend; `load` None opens the load screen at the start."""

    TITLE = "lora-bench"
    CSS_PATH = "workbench.tcss"
    BINDINGS = bindings("app")
    ENABLE_COMMAND_PALETTE = True

    def __init__(self, backend: Backend, inbox: deque[Event], load: LoadModel | None = None,
                 adapters: tuple[StartAdapter, ...] = (), clock: Callable[[], datetime] = datetime.now,
                 chat: Path | None = None) -> None:
        super().__init__()
        self.state = BenchState(clock=clock)
        self.control = Control(self.state, backend)
        self.inbox = inbox
        self._start = (load, adapters, chat)
        self._ticks = 0
        self._stale = 2
        """parts of the screen that are still to be drawn"""
        self._part = 0
        self._key_at = 0.0
        self._settled = False
        """the settings were read"""
        self._leaving = False

    def exit(self, *args: Any, **kwargs: Any) -> None:
        """As Textual's; keys that come behind it are not acted on."""
        self._leaving = True
        super().exit(*args, **kwargs)

    def pop_screen(self) -> AwaitComplete:
        """As Textual's; the last one is not closed, nor one while all are going: that would be an error behind the end."""
        return AwaitComplete.nothing() if self._leaving or len(self.screen_stack) == 1 else super().pop_screen()

    def get_default_screen(self) -> Screen:
        """The main screen is the first that is laid out and painted."""
        return BenchScreen(self.control)

    def on_mount(self) -> None:
        for number in ENDING_SIGNALS:  # leave as by a key: the terminal is restored, the engine ended
            asyncio.get_running_loop().add_signal_handler(number, self.exit, None, 128 + number)
        load, adapters, chat = self._start
        self.state.wanted.extend(adapters)
        if chat:
            self._take_up(chat)
        else:
            self.control.chats.look()
        if load:
            self.control.open_model(load)
        else:
            self.open_load_screen()
        self.set_interval(TICK, self._tick)

    def _take_up(self, chat: Path) -> None:
        try:
            self.state.notice(self.control.chats.take_up(chat))
        except ValueError as error:
            self.state.notice(str(error), "error")

    @on(Driver.SignalResume)
    def _resumed(self) -> None:
        """After Ctrl+Z and fg the terminal shows what the shell left: draw all of it again."""
        self.refresh(layout=True)

    async def on_event(self, event: events.Event) -> None:
        if self._leaving and isinstance(event, events.Key | events.Paste | events.MouseEvent):
            return  # panes that it would act on are going, one after the other
        if isinstance(event, events.Key):
            self._key_at = monotonic()
        if isinstance(event, events.Key | events.MouseDown) and not event.is_forwarded and self.state.hint:
            self.state.hint, self._stale = "", 2  # it spoke of the key before
        await super().on_event(event)

    async def _tick(self) -> None:
        """Fold in what the engine sent; redraw at 5 Hz beside a CPU engine, else at 10 Hz."""
        for _ in range(min(len(self.inbox), EVENTS_A_TICK)):
            event = self.inbox.popleft()
            self.control.receive(event)
            self._stale = 2
            if isinstance(event, _FORWARDED):
                self._forward(event)
        self.control.chats.tick()
        self._ticks += 1
        if self._ticks >= SLOW_TICKS:
            self._stale = 2
        frame = FRAME_GPU if self.state.model and self.state.model.device != "cpu" else FRAME_CPU
        since_key = monotonic() - self._key_at
        waits = AFTER_KEY_S < since_key < TYPING_S and self._ticks < SLOW_TICKS
        if self._stale and self._ticks >= frame // 2 and not waits:
            self._ticks, self._stale = 0, self._stale - 1
            self._part = 1 - self._part
            await self._show_part(self._part)

    async def _show_part(self, part: int) -> None:
        """Draw the chat (0) or the rest (1): apart, so that a key waits for one of them at most."""
        top = self._top()
        if isinstance(top, BenchScreen):
            await (top.show_rest() if part else top.show_chat())
        else:
            await self.show()

    def _top(self) -> Screen | None:
        """The screen on top; None while the app is leaving."""
        return self.screen_stack[-1] if self.screen_stack else None

    async def show(self) -> None:
        """Bring the screen on top to the store, when it is one that shows it."""
        if (show := getattr(self._top(), "show", None)) is not None:
            await show()

    def _forward(self, event: ModelLoading | ModelLoaded | ModelFailed) -> None:
        """Load events go to the load screen while it is open; a load that fails without a model to go back to opens it."""
        if isinstance(event, ModelLoaded):
            self._remember(event)
        screen = next((screen for screen in self.screen_stack if hasattr(screen, "engine_event")), None)
        if screen:
            screen.engine_event(event)
        elif isinstance(event, ModelFailed) and not self.state.model:
            from .load_choices import why_not_loaded  # as the load screen

            self.open_load_screen(why_not_loaded(event))

    def _remember(self, event: ModelLoaded) -> None:
        """Put the model first among the recent ones of the load screen."""
        from .paths import settings_file
        from .settings import read_settings, remember  # its TOML reader takes a while to import

        if not self._settled:
            self._settled = True
            self.state.change = read_settings(settings_file())[0].live_change
        problem = remember(settings_file(), self.control.load or LoadModel(), event.model.name, self.state.clock().astimezone())
        if problem:
            self.state.notice(problem, "error")

    def open_load_screen(self, problem: str = "") -> None:
        """Let the person choose a base."""
        if any(hasattr(screen, "engine_event") for screen in self.screen_stack):
            return  # it is open
        from .screens.load import LoadScreen  # it scans and reads settings: only when it is needed

        self.push_screen(LoadScreen(self.control.load, problem))

    def on_load_screen_open(self, event: LoadScreen.Open) -> None:
        self.control.open_model(event.load)

    def on_load_screen_cancel_load(self) -> None:
        self.control.cancel_load()

    # -- keys -----------------------------------------------------------------------------------
    async def run_action(self, action: str, default_namespace: DOMNode | None = None,
                         namespaces: Mapping[str, DOMNode] | None = None) -> bool:
        return goes_by_no_lines(action, default_namespace) or await super().run_action(action, default_namespace, namespaces)

    def action_command_palette(self) -> None:
        if not Palette.is_open(self):
            self.push_screen(Palette(id="--command-palette"))

    def action_open_model(self) -> None:
        self.open_load_screen()

    def action_help(self) -> None:
        from .screens.help import MAIN_PANES, HelpScreen

        top = self.screen
        if not isinstance(top, HelpScreen):
            pane = top.pane() if hasattr(top, "pane") else getattr(top, "PALETTE_PANES", ("app",))[0]
            self.push_screen(HelpScreen(pane, getattr(top, "HELP_PANES", MAIN_PANES)))

    def action_interrupt(self) -> None:
        """Ctrl+C copies a selection; without one it stops what runs, and never leaves."""
        selected = getattr(self.focused, "selected_text", "") or self.screen.get_selected_text() or ""
        if selected:
            self.copy_to_clipboard(clean(selected))
            said = "copied"
        elif getattr(self.screen, "stop_here", self.control.stop)():
            said = "Ctrl+C stopped the reply; Ctrl+Q leaves"
        elif self.control.cancel_load():
            said = "Ctrl+C stopped the load; Ctrl+Q leaves"
        else:
            said = "Ctrl+C copies selected text and stops replies; Ctrl+Q leaves"
        if isinstance(self.screen, BenchScreen):
            self.state.hint, self._stale = said, 2
        else:
            self.notify(said, markup=False)

    async def action_restart_engine(self) -> None:
        try:
            self.control.restart()
        except OSError as error:
            self.state.notice(f"the engine could not be started: {error}", "error")
        await self.show()

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        """Every key of the screen on top is an entry of the palette."""
        panes = getattr(screen, "PALETTE_PANES", ("app",))
        for pane in panes:
            target = self._target(screen, pane)
            for key in KEYS[pane]:
                if target is not None and target.check_action(key.action.partition("(")[0], ()) is not False:
                    run = self._runner(screen, pane, key.action)
                    yield SystemCommand(f"{key.help}  ({key.keys})", f"{PANE_TITLES[pane]}: {key.label}", run)
        yield SystemCommand("Forget the KV blocks that no running reply holds  (/clear-cache)", "Anywhere: Clear the KV cache",
                            self._clear_cache)
        yield SystemCommand("Choose the colours", "Anywhere: Theme", self.action_change_theme)

    def _clear_cache(self) -> None:
        self.notify(self.control.clear_cache(), markup=False)

    def _target(self, screen: Screen, pane: str) -> DOMNode | None:
        return screen.action_target(pane) if hasattr(screen, "action_target") else self

    def _runner(self, screen: Screen, pane: str, action: str) -> Callable:
        async def run() -> None:
            if (target := self._target(screen, pane)) is not None:
                await self.run_action(action, default_namespace=target)

        return run

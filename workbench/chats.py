"""Keeps the chat on disk while it grows, and brings chats of earlier runs back."""
from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from . import exit_codes, output
from .chat_file import ChatFile, InUse, Saved, find_chats, open_chats, read_chat
from .chat_records import FORMAT, Began, Bench, PastChat, Recorder, line_of
from .paths import chats_folder
from .text import clean_line, counted
from .transcript import Turn

if TYPE_CHECKING:
    from .control import Control

EVERY_S = 0.5
MOST_LISTED = 20


class Chats:
    """The chat of `control` in its file. Called by the screen's thread; the disk is not, but for `list` and `resume`."""

    def __init__(self, control: Control) -> None:
        self.folder = chats_folder()
        self._control = control
        self._file: ChatFile | None = None
        self._finishing: list[ChatFile] = []
        self._recorder = Recorder()
        self._turns: list[Turn] = []
        self._problems: deque[str] = deque()
        self._found: deque[Saved] = deque()
        self._listed: list[Saved] = []
        self._due = 0.0
        self._wanted: bool | None = None
        """whether the person wants chats to be kept; None until the settings were read"""

    # -- keeping --------------------------------------------------------------------------------
    def tick(self) -> None:
        """Put down what is new, twice a second; say what went wrong."""
        if (now := monotonic()) >= self._due:
            self._due = now + EVERY_S
            self.keep()
        while self._problems:
            self._control.state.notice(self._problems.popleft(), "error")
        if self._found:
            self._control.state.last_chat = title(self._found.popleft())

    def keep(self) -> None:
        turns = [item for item in self._control.state.items if isinstance(item, Turn) and item.versions]
        if self._turns and not (turns and turns[0] is self._turns[0]):
            self._leave()
        if turns and self._keeps():
            self._turns = turns
            began = b""
            if not self._file:
                now = self._control.state.clock()
                self._file = ChatFile(self.folder, self._problems.append, now)
                began = line_of(Began(FORMAT, now.isoformat(timespec="seconds")))
            self._write(began)

    def close(self) -> None:
        """The chat is on disk; for the end of the program."""
        self.keep()
        self._leave()
        self._wait()

    def _write(self, begun: bytes = b"", leaving: bool = False) -> None:
        lines = begun + b"".join(map(line_of, self._recorder.news(bench_of(self._control), self._turns, leaving)))
        if lines:
            self._file.write(lines)

    def _leave(self) -> None:
        if self._file:
            self._write(leaving=True)
            self._file.finish()
            self._finishing.append(self._file)
        self._file, self._turns, self._recorder = None, [], Recorder()

    def _wait(self) -> None:
        while self._finishing:
            self._finishing.pop().wait()

    def _keeps(self) -> bool:
        if self._wanted is None:
            from .paths import settings_file
            from .settings import read_settings  # its TOML reader takes a while to import

            settings, problem = read_settings(settings_file())
            self._wanted = settings.keep_chats
            self._problems.extend(filter(None, [problem]))
        return self._wanted

    # -- bringing back --------------------------------------------------------------------------
    def look(self) -> None:
        """Find the latest chat in the background, to be offered in the empty chat pane."""
        threading.Thread(target=self._look, name="last-chat", daemon=True).start()

    def _look(self) -> None:
        with suppress(OSError):  # no chats are to be had there; it is said when one cannot be kept
            self._found.extend(saved for saved, _ in zip(find_told(self._problems.append), range(1), strict=False))

    def list(self) -> str:
        """The latest chats, numbered as `resume` takes them. Raises ValueError when they cannot be read."""
        try:
            self._wait()
            self._listed = [saved for saved, _ in zip(find_told(self._problems.append), range(MOST_LISTED), strict=False)]
            if not self._listed:
                return none_text(bool(self._file and self._file.made))
        except OSError as error:
            raise ValueError(f"{self.folder} cannot be read: {error.strerror or error}") from error
        return "\n".join([*(f"{number}  {title(saved)}" for number, saved in enumerate(self._listed, 1)),
                          f"/resume NUMBER goes on with one; they lie in {self.folder}"])

    def resume(self, which: str) -> str:
        """Go on with the chat of that number or name, "" the latest; what to say of it. Raises ValueError when that cannot be."""
        listed = self.list() if not self._listed or not which else ""
        if not self._listed:
            raise ValueError(listed)
        number = int(which or 1) if (which or "1").isdecimal() and len(which) < 9 else 0
        saved = self._listed[number - 1] if 0 < number <= len(self._listed) else next((s for s in self._listed if s.name == which), None)
        if saved is None:
            raise ValueError(f"{which or 'that'} is no earlier chat; /chats lists them")
        if self._control.state.running:
            raise ValueError("a reply is being written: Esc stops it")
        return self.take_up(saved.file)

    def take_up(self, file: Path) -> str:
        """The chat of the file is the chat now, and goes on in the file; what to say of it. Raises ValueError."""
        self.keep()
        self._leave()
        self._wait()
        try:
            saved = read_chat(file)
            if not saved.chat:
                raise ValueError(saved.problem or f"there is nothing in the chat {saved.name}")
            opened = ChatFile(self.folder, self._problems.append, self._control.state.clock(), file) if self._keeps() else None
        except OSError as error:
            raise ValueError(f"the chat {file} cannot be read: {error.strerror or error}") from error
        except InUse as error:
            raise ValueError(str(error)) from error
        self._file, self._recorder = opened, Recorder(saved.chat)
        self._control.take_up(saved.chat)
        self._turns = saved.chat.turns
        self._listed = []
        return "\n".join(filter(None, [saved.problem, held_text(saved, self._control.load)]))


def find_told(tell: Callable[[str], None]) -> Iterator[Saved]:
    """The chats of earlier runs that can be read, the latest first; `tell` gets a sentence for each that was damaged. Raises OSError."""
    for saved in find_chats(chats_folder()):
        if saved.problem:
            tell(saved.problem)
        if saved.chat:
            yield saved


def report(as_json: bool) -> int:
    """Print the chats of earlier runs; returns the exit code."""
    found = list(find_told(output.warn))
    if as_json:
        output.write(json.dumps([_facts(saved) for saved in found]) + "\n")
    else:
        output.write("".join(f"{title(saved)}\n    {saved.file}\n" for saved in found) or f"{none_text()}\n")
    return exit_codes.OK


def none_text(own: int = 0) -> str:
    """Why there is no chat to go on with. `own`: chats that this workbench has open itself. Raises OSError."""
    folder = chats_folder()
    if elsewhere := open_chats(folder) - own:
        which = "the earlier chat is" if elsewhere == 1 else f"all {elsewhere} earlier chats are"
        return f"{which} open in another workbench: leave it there to go on with it here"
    return f"no earlier chat is in {folder}: a chat is kept from its first question on"


def _facts(saved: Saved) -> dict[str, object]:
    bench = saved.chat.bench
    return {"file": str(saved.file), "began": saved.chat.began.at, "used": saved.used.isoformat(timespec="seconds"), "model": bench.model,
            "turns": len(saved.chat.turns), "adapters": [adapter.name for adapter in bench.adapters], "asked": _asked(saved.chat)}


def bench_of(control: Control) -> Bench:
    model = control.state.model
    return Bench(control.load, model.name if model else "", control.adapters(), control.system, control.sampling)


def title(saved: Saved) -> str:
    """When, how long, on what, and how it begins: one line, cleaned."""
    chat = saved.chat
    model = f" · {clean_line(chat.bench.model, 40)}" if chat.bench.model else ""
    return f"{when(saved.used)} · {counted(len(chat.turns), 'turn')}{model} · {clean_line(_asked(chat), 60)}"


def _asked(chat: PastChat) -> str:
    """The first thing that the person said."""
    return next((turn.asked for turn in chat.turns if turn.asked), "")


def when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def held_text(saved: Saved, load: object) -> str:
    """What to know before going on with a chat."""
    bench = saved.chat.bench
    path = getattr(bench.load, "path", None)
    other = (f"; it was held on {clean_line(bench.model or path, 60)}, Ctrl+O opens that" if bench.load and load
             and getattr(load, "path", None) != path else "")
    return f"the chat of {when(saved.used)} goes on{other}"

"""The files of chats: one each, which only grows. A kill at any byte leaves every line but the last whole.

The file that is written to is locked, so that one chat is not continued by two workbenches at once. What cannot be read is never thrown
away: the file as it was is kept aside under another name before the good part takes its place.
"""
from __future__ import annotations

import fcntl
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from .chat_records import PastChat, read_lines
from .whole_files import aside, replace_file

ENDING = ".jsonl"
MAX_BYTES = 64 << 20
CLOSE_S = 2.0


class InUse(Exception):
    """Another workbench writes to the file."""


@dataclass(frozen=True)
class Saved:
    """A chat that was found. `chat` None: nothing of it could be read; `problem` says what was damaged, and where it is kept."""

    file: Path
    used: datetime
    chat: PastChat | None
    problem: str = ""

    @property
    def name(self) -> str:
        return self.file.name.removesuffix(ENDING)


class ChatFile:
    """A chat's file, written by a thread of its own: a slow disk holds nobody up. `file` None: one is made in `folder` by the first lines.

    `tell` is called from that thread with a sentence when the chat cannot be kept; what was not written is tried again with the next lines.
    Raises OSError when `file` cannot be opened, InUse when another workbench has it.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None], began: datetime, file: Path | None = None) -> None:
        self._folder, self._tell, self._began = folder, tell, began
        self._fd = _lock(file, os.O_RDWR | os.O_APPEND) if file else -1
        self._length = os.fstat(self._fd).st_size if file else 0
        self._pending = b""
        self._failing = False
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="chat-file", daemon=True)
        self._thread.start()

    @property
    def made(self) -> bool:
        """Whether the file is there."""
        return self._fd >= 0

    def write(self, lines: bytes) -> None:
        self._lines.put(lines)

    def finish(self) -> None:
        """Nothing more is to come; what was given is still written."""
        self._lines.put(None)

    def wait(self) -> None:
        """After `finish`: all is on the disk, or it was told why not; a disk that hangs is not waited for longer than CLOSE_S."""
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        going_on = True
        while going_on:
            going_on = self._gather()
            try:
                self._append()
                self._failing = False
            except OSError as error:
                self._back_to_whole_lines()
                if not self._failing:
                    self._failing = True
                    self._tell(f"the chat cannot be kept in {self._folder} ({error.strerror or error}); the workbench goes on without")
        if self._fd >= 0:
            os.close(self._fd)

    def _gather(self) -> bool:
        """Wait for lines and take all that are there; False when no more are to come."""
        while (lines := self._lines.get()) is not None:
            self._pending += lines
            if self._lines.empty():
                return True
        return False

    def _append(self) -> None:
        if not self._pending:
            return
        if self._fd < 0:
            self._make()
            return
        _write(self._fd, self._pending)
        os.fsync(self._fd)
        self._length += len(self._pending)
        self._pending = b""

    def _make(self) -> None:
        """The file appears under its name with its first lines in it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"{self._began:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}{ENDING}"
        partial = self._folder / f".{name}"
        fd = os.open(partial, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, self._pending)
            os.fsync(fd)
            os.rename(partial, self._folder / name)
        except OSError:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise
        self._fd, self._length, self._pending = fd, len(self._pending), b""

    def _back_to_whole_lines(self) -> None:
        with suppress(OSError):
            if self._fd >= 0:
                os.ftruncate(self._fd, self._length)


def find_chats(folder: Path) -> Iterable[Saved]:
    """The chats in the folder, the latest first, without those that a workbench has open. Raises OSError when it cannot be read."""
    if not folder.exists():
        return
    _sweep(folder)
    files = [(file.stat().st_mtime, file) for file in folder.glob(f"[!.]*{ENDING}") if file.is_file()]
    for _, file in sorted(files, reverse=True):
        with suppress(InUse, FileNotFoundError):
            yield read_chat(file)


def open_chats(folder: Path) -> int:
    """How many chats of the folder a workbench has open, this one included. Raises OSError when one cannot be looked at."""
    found = 0
    for file in folder.glob(f"[!.]*{ENDING}"):
        try:
            os.close(_lock(file, os.O_RDONLY))
        except InUse:
            found += 1
    return found


def read_chat(file: Path) -> Saved:
    """A chat; one that is damaged is mended: the file as it was is kept aside. Raises OSError, InUse."""
    fd = _lock(file, os.O_RDONLY)
    try:
        used = datetime.fromtimestamp(os.fstat(fd).st_mtime)
        if (size := os.fstat(fd).st_size) > MAX_BYTES:
            return Saved(file, used, None, f"the chat {file} was left alone: it takes {size:,} bytes, over the limit of {MAX_BYTES:,}")
        data = _read(fd, size)
        chat, good, why = read_lines(data)
        if not why:
            return Saved(file, used, chat)
        if chat and not chat.turns:
            chat = None
        return Saved(file, used, chat, _mend(file, data[:good] if chat else b"", why))
    finally:
        os.close(fd)


def _mend(file: Path, good: bytes, why: str) -> str:
    """Keep the damaged file aside and put its good part in its place; the sentence that says so."""
    kept = aside(file)
    rest = "what came before was read" if good else "nothing of it could be read"
    try:
        if good:
            os.link(file, kept)
            try:
                replace_file(file, good)
            except OSError:
                kept.unlink()
                raise
        else:
            os.rename(file, kept)
    except OSError as error:
        return f"the chat {file} is damaged ({why}); {rest}, and it could not be put aside ({error.strerror or error})"
    return f"the chat {file.name} is damaged ({why}); {rest}, and the file as it was is kept as {kept}"


def _sweep(folder: Path) -> None:
    """Beginnings of files that a kill kept from getting their name."""
    for partial in folder.glob(f".*{ENDING}*"):
        with suppress(OSError, InUse):
            os.close(_lock(partial, os.O_RDONLY))
            partial.unlink()


def _lock(file: Path, flags: int) -> int:
    fd = os.open(file, flags | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise InUse(f"the chat {file.name.removesuffix(ENDING)} is open in another workbench") from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _read(fd: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(fd, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]

"""The engine's loop: drain the commands, make a step, emit, survive errors. The same in a thread and in the child process."""
from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable

from .engine import DuplicateRequest, Engine
from .failures import out_of_memory, sentence
from .protocol import (
    Abort,
    AdapterFailed,
    CancelLoad,
    Command,
    CommandFailed,
    Emit,
    EngineFailed,
    EngineSnapshot,
    Event,
    Generate,
    LoadAdapter,
    LoadModel,
    MixRefused,
    ModelFailed,
    PinAdapter,
    RequestFailed,
    SetInvocation,
    SetMix,
    Shutdown,
    UnloadAdapter,
)

SNAPSHOT_SECONDS = 0.1
IDLE_SECONDS = 1.0
"""between two snapshots while nothing happens: ages and memory go on"""


class Inbox:
    """Commands on their way to the loop. Any thread may put; the loop takes, and may look for a cancel while it is busy."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._seen: deque[Command] = deque()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def take(self, timeout: float) -> Command | None:
        """The oldest command; None when there is none within `timeout` seconds."""
        if self._seen:
            return self._seen.popleft()
        try:
            return self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None

    def load_cancelled(self) -> bool:
        """Whether CancelLoad (which is used up) or Shutdown (which stays) came in behind the command being carried out."""
        while True:
            try:
                self._seen.append(self._queue.get_nowait())
            except queue.Empty:
                break
        cancels = [command for command in self._seen if isinstance(command, CancelLoad)]
        for command in cancels:
            self._seen.remove(command)
        return bool(cancels) or any(isinstance(command, Shutdown) for command in self._seen)


def serve(inbox: Inbox, emit: Emit) -> None:
    """Carry out commands until Shutdown. Every failure is an event; none ends the loop."""
    _Service(inbox, emit).run()


class _Service:
    def __init__(self, inbox: Inbox, emit: Emit) -> None:
        self._inbox = inbox
        self._send = emit
        self._changed = False
        self._snapshot_at = 0.0
        self.engine = Engine(self._emit)

    def run(self) -> None:
        while True:
            command = self._inbox.take(self._patience())
            while command is not None:
                if isinstance(command, Shutdown):
                    return
                self._carry_out(command)
                command = self._inbox.take(0.0)
            self._step()
            self._snapshot()

    def _emit(self, event: Event) -> None:
        self._changed = True
        self._send(event)

    def _patience(self) -> float:
        """Seconds that the loop may sleep."""
        if self.engine.busy:
            return 0.0
        due = self._snapshot_at + (SNAPSHOT_SECONDS if self._changed else IDLE_SECONDS) - time.monotonic()
        return max(due, 0.001)

    def _snapshot(self) -> None:
        age = time.monotonic() - self._snapshot_at
        if age < SNAPSHOT_SECONDS or not (self._changed or age >= IDLE_SECONDS):
            return
        snapshot: EngineSnapshot = self.engine.snapshot()
        self._send(snapshot)
        self._changed, self._snapshot_at = False, time.monotonic()

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:
            memory = out_of_memory(error)
            message = f"the step failed: {sentence(error)}; the running requests were dropped"
            self.engine.drop_requests(message, memory)
            self._emit(EngineFailed(message, fatal=False, out_of_memory=memory))

    def _carry_out(self, command: Command) -> None:
        try:
            _ACTIONS[type(command)](self, command)
        except Exception as error:
            self._emit(_failure(command, error))

    def _load_model(self, command: LoadModel) -> None:
        self.engine.load_model(command, self._inbox.load_cancelled)


def _failure(command: Command, error: Exception) -> Event:
    """The event that says in words why `command` was not carried out."""
    text, memory = sentence(error), out_of_memory(error)
    match command:
        case LoadModel():
            return ModelFailed(text, cancelled=type(error).__name__ in ("LoadCancelled", "DownloadCancelled"), out_of_memory=memory)
        case LoadAdapter():
            return AdapterFailed(command.name or "", command.path, text, out_of_memory=memory)
        case Generate() if not isinstance(error, DuplicateRequest):  # that one has not ended
            return RequestFailed(command.request_id, text, out_of_memory=memory)
        case SetMix():
            return MixRefused(command.mix, text)
        case _:
            return CommandFailed(text)


_ACTIONS: dict[type, Callable[[_Service, Command], object]] = {
    LoadModel: _Service._load_model,
    CancelLoad: lambda service, command: None,  # nothing is being loaded: it came too late
    LoadAdapter: lambda service, command: service.engine.load_adapter(command.path, command.name),
    UnloadAdapter: lambda service, command: service.engine.unload_adapter(command.name),
    PinAdapter: lambda service, command: service.engine.pin_adapter(command.name, command.pinned),
    SetInvocation: lambda service, command: service.engine.set_invocation(command.name, command.text),
    Generate: lambda service, command: service.engine.submit(command),
    SetMix: lambda service, command: service.engine.set_mix(command.mix, command.request_ids),
    Abort: lambda service, command: service.engine.abort(command.request_id),
}

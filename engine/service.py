"""The engine's loop: drain the commands, make a step, emit, survive errors. The same in a thread and in the child process.

Adapters are read beside it; a command that needs one of them waits for it, and the commands behind that one wait too.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from .adapter_loads import AdapterLoads
from .adapter_read import ReadAdapter
from .checks import STOPPED as CHECK_STOPPED
from .engine import DuplicateRequest, Engine
from .failures import out_of_memory, sentence
from .inbox import Inbox
from .protocol import (
    Abort,
    AdapterFailed,
    CancelCheck,
    CancelLoad,
    CancelScore,
    CheckAdapter,
    CheckFailed,
    ClearCache,
    Command,
    CommandFailed,
    Emit,
    EngineFailed,
    EngineSnapshot,
    Event,
    Generate,
    GenerateTogether,
    LoadAdapter,
    LoadModel,
    MixRefused,
    ModelFailed,
    PinAdapter,
    ReloadAdapter,
    ReloadFailed,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    RequestStats,
    Score,
    ScoreFailed,
    SetInvocation,
    SetMix,
    Shutdown,
    Tokenize,
    Tokenized,
    TraceFailed,
    TraceStep,
    UnloadAdapter,
)
from .scores import STOPPED as SCORE_STOPPED
from .tokenized import tokenized
from .watch import FileWatch
from .weights.load import LoadCancelled

SNAPSHOT_SECONDS = 0.1
IDLE_SECONDS = 1.0
"""between two snapshots while nothing happens: ages and memory go on"""


def serve(inbox: Inbox, emit: Emit) -> None:
    """Carry out commands until Shutdown. Every failure is an event; none ends the loop."""
    _Service(inbox, emit).run()


class _Service:
    def __init__(self, inbox: Inbox, emit: Emit) -> None:
        self._inbox = inbox
        self._send = emit
        self._changed = False
        self._snapshot_at = 0.0
        self._loads = AdapterLoads(inbox.wake)
        self._held: list[Command] = []
        """commands that wait for adapters that are being read"""
        self._watch = FileWatch()
        self.engine = Engine(self._emit, inbox.wake)

    def run(self) -> None:
        while True:
            command = self._inbox.take(self._patience())
            while command is not None:
                if isinstance(command, Shutdown):
                    return
                self._receive(command)
                command = self._inbox.take(0.0)
            self._settle_loads()
            self._look_at_files()
            self._step()
            if not self.engine.busy:  # else with the next step
                self._snapshot()

    def _emit(self, event: Event) -> None:
        self._changed = True
        self._send(event)

    def _patience(self) -> float:
        """Seconds that the loop may sleep."""
        if self.engine.busy or self.engine.checks.busy or self.engine.scores.busy:
            return 0.0
        often = self._changed or self._loads.pending
        due = self._snapshot_at + (SNAPSHOT_SECONDS if often else IDLE_SECONDS) - time.monotonic()
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
            stepped = self.engine.step(self._snapshot)
            scoring, checks = self.engine.scores.busy, self.engine.checks
            if scoring:
                self.engine.scores.advance()
            if not stepped and checks.busy and (checks.under_way or not scoring):  # others may wait for what one under way holds
                checks.advance()
        except Exception as error:
            memory = out_of_memory(error)
            message = f"the step failed: {sentence(error)}; the running requests were dropped"
            self.engine.drop_requests(message, memory)
            self._emit(EngineFailed(message, fatal=False, out_of_memory=memory))

    def _carry_out(self, command: Command) -> None:
        try:
            _ACTIONS[type(command)](self, command)
        except Exception as error:
            self._fail(command, error)

    def _fail(self, command: Command, error: Exception) -> None:
        for event in _failures(command, error, self.engine.request_ids):
            self._emit(event)

    def _load_model(self, command: LoadModel) -> None:
        self.engine.load_model(command, self._inbox.load_cancelled)

    # -- adapters that are being read ------------------------------------------------------------
    def _receive(self, command: Command) -> None:
        """Carry out a command, or hold it back until the adapters are read that it needs."""
        if isinstance(command, CancelLoad):
            self._cancel_loads()
        elif isinstance(command, Abort):
            self._abort(command)
        elif isinstance(command, CancelCheck | CancelScore | TraceStep):
            self._carry_out(command)
        elif not isinstance(command, Tokenize) and (self._held or self._needs_a_load(command)):
            self._hold(command)
        else:
            self._carry_out(command)

    def _needs_a_load(self, command: Command) -> bool:
        if not self._loads.pending:
            return False
        unknown = _names(command) - self.engine.adapter_names
        reading = _names(command) & self._loads.names if not isinstance(command, SetMix) else frozenset()
        return isinstance(command, LoadModel) or bool(unknown or reading)

    def _hold(self, command: Command) -> None:
        self._held.append(command)
        for request in _generates(command):
            self._emit(RequestQueued(request.request_id, "an adapter is being read from disk"))

    def _load_adapter(self, command: LoadAdapter) -> None:
        store = self.engine.model.store
        self._loads.start(command, command.path, lambda *watch: store.read(command.path, command.name, *watch))

    def _reload_adapter(self, command: ReloadAdapter) -> None:
        store = self.engine.model.store
        path = store.path(command.name)
        self._loads.start(command, str(path), lambda *watch: store.read(path, command.name, *watch))

    def _settle_loads(self) -> None:
        """Take in what was read; then the commands that waited for it, in their order."""
        if not self._loads.pending:
            return
        for command, outcome in self._loads.finished():
            try:
                self._settle(command, outcome)
            except Exception as error:
                self._fail(command, error)
        if (progress := self._loads.progress()) is not None:
            self._emit(progress)
        self._let_go()

    def _settle(self, command: LoadAdapter | ReloadAdapter, outcome: ReadAdapter | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(command, ReloadAdapter):
            self.engine.replace_adapter(command.name, outcome)
        else:
            self.engine.model.store.add(outcome, command.name)

    def _let_go(self) -> None:
        if not self._loads.pending:
            self._inbox.put_back(self._held)
            self._held.clear()

    def _cancel_loads(self) -> None:
        """Every load that is pending; one of a base that waits behind them finds the command when its turn comes."""
        for command, path in self._loads.cancel():
            self._fail(command, LoadCancelled(f"{path}: loading was cancelled"))
        if any(isinstance(command, LoadModel) for command in self._held):
            self._held.append(CancelLoad())
        self._let_go()

    def _abort(self, command: Abort) -> None:
        """A request that waits behind a load is over without having begun."""
        held = self._held if command.request_id not in self.engine.request_ids else ()
        for place, other in enumerate(held):
            if request := next((one for one in _generates(other) if one.request_id == command.request_id), None):
                left = tuple(one for one in _generates(other) if one is not request)
                self._held[place : place + 1] = [GenerateTogether(left)] if left else []
                self._emit(RequestFinished(command.request_id, "aborted", RequestStats(0, 0, 0.0, 0.0, 0.0, 0.0, request.sampling.seed)))
                return
        self._carry_out(command)

    def _cancel_check(self, command: CancelCheck) -> None:
        """One that waits behind a load is over, too."""
        held = [other for other in self._held if isinstance(other, CheckAdapter) and other.name == command.name]
        self._held = [other for other in self._held if other not in held]
        if not self.engine.checks.cancel(command.name) and held:
            self._emit(CheckFailed(command.name, CHECK_STOPPED, cancelled=True))

    def _cancel_score(self, command: CancelScore) -> None:
        """One that waits behind a load is over, too."""
        held = [other for other in self._held if isinstance(other, Score) and other.score_id == command.score_id]
        self._held = [other for other in self._held if other not in held]
        if not self.engine.scores.cancel(command.score_id) and held:
            self._emit(ScoreFailed(command.score_id, SCORE_STOPPED, cancelled=True))

    def _look_at_files(self) -> None:
        found = self._watch.poll(self.engine.watched)
        if found is not None:
            self.engine.files_seen(found)


def _failures(command: Command, error: Exception, alive: Collection[int]) -> Sequence[Event]:
    """The events that say in words why `command` was not carried out. `alive`: requests that have not ended."""
    if not isinstance(command, GenerateTogether):
        return (_failure(command, error),)
    text, memory = sentence(error), out_of_memory(error)
    others = dict.fromkeys(request.request_id for request in command.requests if request.request_id not in alive)
    told = (CommandFailed(text),) if isinstance(error, DuplicateRequest) or not others else ()
    return (*told, *(RequestFailed(number, text, out_of_memory=memory) for number in others))


def _failure(command: Command, error: Exception) -> Event:
    text, memory = str(error) if isinstance(error, LoadCancelled) else sentence(error), out_of_memory(error)
    match command:
        case LoadModel():
            return ModelFailed(text, cancelled=type(error).__name__ in ("LoadCancelled", "DownloadCancelled"), out_of_memory=memory)
        case LoadAdapter():
            return AdapterFailed(command.name or "", command.path, text, memory, isinstance(error, LoadCancelled))
        case ReloadAdapter():
            return ReloadFailed(command.name, text, memory, isinstance(error, LoadCancelled))
        case Generate() if not isinstance(error, DuplicateRequest):  # that one has not ended
            return RequestFailed(command.request_id, text, out_of_memory=memory)
        case SetMix():
            return MixRefused(command.mix, text)
        case Score():
            return ScoreFailed(command.score_id, text, memory)
        case Tokenize():
            return Tokenized(command.ask_id, (), (), detail=text)
        case TraceStep():
            return TraceFailed(text)
        case _:
            return CommandFailed(text)


def _generates(command: Command) -> tuple[Generate, ...]:
    """The requests that a command asks for."""
    return command.requests if isinstance(command, GenerateTogether) else (command,) if isinstance(command, Generate) else ()


def _names(command: Command) -> frozenset[str]:
    """The adapters that a command needs to be there."""
    match command:
        case Generate() | SetMix():
            return frozenset(use.name for use in command.mix)
        case GenerateTogether():
            return frozenset(use.name for request in command.requests for use in request.mix)
        case Score():
            return frozenset(use.name for mix in command.mixes for use in mix)
        case Shutdown() | LoadModel() | LoadAdapter() | CancelLoad() | Abort() | CancelScore() | ClearCache() | Tokenize() | TraceStep():
            return frozenset()
        case _:
            return frozenset((command.name,))


_ACTIONS: dict[type, Callable[[_Service, Command], object]] = {
    LoadModel: _Service._load_model,
    CancelLoad: lambda service, command: None,  # nothing is being loaded: it came too late
    LoadAdapter: _Service._load_adapter,
    ReloadAdapter: _Service._reload_adapter,
    UnloadAdapter: lambda service, command: service.engine.unload_adapter(command.name),
    PinAdapter: lambda service, command: service.engine.pin_adapter(command.name, command.pinned),
    SetInvocation: lambda service, command: service.engine.set_invocation(command.name, command.text, command.in_reply),
    CancelCheck: _Service._cancel_check,
    CheckAdapter: lambda service, command: service.engine.checks.ask(command.name, command.effect),
    Generate: lambda service, command: service.engine.submit(command),
    GenerateTogether: lambda service, command: service.engine.submit_together(command),
    SetMix: lambda service, command: service.engine.set_mix(command.mix, command.request_ids, command.change),
    ClearCache: lambda service, command: service.engine.clear_cache(),
    Score: lambda service, command: service.engine.scores.ask(command),
    CancelScore: _Service._cancel_score,
    Tokenize: lambda service, command: service._emit(tokenized(service.engine.model, command)),
    TraceStep: lambda service, command: service.engine.trace(),
    Abort: lambda service, command: service.engine.abort(command.request_id),
}

"""The engine for one command of the command line: what it says on the way becomes warnings, a line of progress, or a failure."""
from __future__ import annotations

import queue
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..engine import protocol as p
from . import exit_codes, output
from .arguments import AdapterArgument, escape
from .backends.local import LocalBackend
from .exit_codes import Failed
from .text import clean_line


@contextmanager
def engine_run() -> Iterator[EngineRun]:
    """An engine process that ends with the block. Raises Failed when there can be none."""
    events: queue.SimpleQueue[p.Event] = queue.SimpleQueue()
    backend = LocalBackend(events.put)
    try:
        try:
            backend.start()
        except OSError as error:
            raise Failed(f"the engine process cannot be started: {error}", exit_codes.ENGINE_ERROR) from error
        run = EngineRun(backend, events)
        try:
            yield run
        finally:
            run.progress.clear()
    finally:
        backend.stop()


class EngineRun:
    def __init__(self, backend: LocalBackend, events: queue.SimpleQueue[p.Event]) -> None:
        self._backend, self._queue = backend, events
        self.progress = output.ProgressLine()

    def send(self, command: p.Command) -> None:
        self._backend.send(command)

    def events(self) -> Iterator[p.Event]:
        """What the engine says, without end; failures that end everything are raised."""
        while True:
            event = self._queue.get()
            if isinstance(event, p.EngineFailed):
                raise Failed(event.message, exit_codes.OUT_OF_MEMORY if event.out_of_memory else exit_codes.ENGINE_ERROR)
            if isinstance(event, p.CommandFailed):
                raise Failed(event.message, exit_codes.ENGINE_ERROR)
            yield event

    def load_model(self, load: p.LoadModel) -> p.ModelInfo:
        self.progress.show("starting the engine process")
        self.send(load)
        for event in self.events():
            match event:
                case p.ModelLoading():
                    self.progress.show(output.progress_text(event.phase, event.item, event.done, event.total))
                case p.ModelFailed():
                    unusable = exit_codes.INCOMPATIBLE if load.path else exit_codes.ENGINE_ERROR
                    raise Failed(event.message, exit_codes.OUT_OF_MEMORY if event.out_of_memory else unusable)
                case p.ModelLoaded():
                    self.warn(*(f"{event.model.name}: {note}" for note in event.model.notes))
                    return event.model
        raise AssertionError("the events never end")

    def load_adapter(self, argument: AdapterArgument) -> p.AdapterInfo:
        self.progress.show(f"loading {argument.name or argument.path}")
        self.send(p.LoadAdapter(argument.path, argument.name))
        for event in self.events():
            match event:
                case p.AdapterLoading():
                    self.progress.show(output.progress_text("adapter", argument.name or argument.path, event.done, event.total))
                case p.AdapterFailed():
                    raise Failed(event.message, exit_codes.OUT_OF_MEMORY if event.out_of_memory else exit_codes.INCOMPATIBLE)
                case p.AdapterLoaded():
                    self.warn(*(f"{event.adapter.name}: {note}" for note in event.adapter.notes))
                    if event.adapter.dora and not argument.scale:
                        self.warn(f"{event.adapter.name}: DoRA at scale 0 is off, the base itself; "
                                  "PEFT's scale 0 would keep the trained magnitudes")
                    return event.adapter
        raise AssertionError("the events never end")

    def warn(self, *texts: str) -> None:
        self.progress.clear()
        for text in texts:
            output.warn(text)

    def warn_of_silent(self, activations: Iterable[p.Activation], adapters: Iterable[p.AdapterInfo], where: str) -> None:
        """An aLoRA that is off is a warning, with the way to switch it on."""
        invocations = {adapter.name: adapter.invocation for adapter in adapters}
        for activation in activations:
            if not activation.found:
                way = shlex.quote(clean_line(escape(invocations.get(activation.adapter, ""))))
                self.warn(f"{activation.adapter}: is off for {where}: {activation.detail}; --opening {way} invokes it")

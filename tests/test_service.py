"""The loop and the child process: order, cancelling a load, failures as events, frames that nothing can spoil."""
from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lora_bench.engine import protocol
from lora_bench.engine.engine import NO_MODEL, Engine
from lora_bench.engine.machine import usable_cores
from lora_bench.engine.protocol import (
    Abort,
    AdapterFailed,
    AdapterLoaded,
    AdapterUse,
    CacheCleared,
    CancelLoad,
    ClearCache,
    CommandFailed,
    EngineFailed,
    EngineSnapshot,
    EngineStarted,
    Event,
    Generate,
    GenerateTogether,
    LoadAdapter,
    LoadModel,
    MixRefused,
    ModelFailed,
    ModelLoaded,
    ModelLoading,
    PinAdapter,
    RequestFailed,
    RequestFinished,
    Sampling,
    SetInvocation,
    SetMix,
    Shutdown,
    StepTraced,
    TokenIds,
    TraceFailed,
    TraceStep,
    UnloadAdapter,
    read_events,
    write_frame,
)
from lora_bench.engine.service import Inbox, serve

Write = Callable[..., Path]


def _generate(number: int, **sampling: object) -> Generate:
    return Generate(number, TokenIds((5, 6, 7)), (), Sampling(**{"max_tokens": 5} | sampling))


def _served(*commands: protocol.Command) -> list[Event]:
    """All events of a loop that got `commands` at once and then Shutdown after its requests ended."""
    events: list[Event] = []
    inbox = Inbox()
    open_requests = {command.request_id for command in commands if isinstance(command, Generate)}
    open_requests |= {request.request_id for command in commands if isinstance(command, GenerateTogether) for request in command.requests}

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, (RequestFinished, RequestFailed)):
            open_requests.discard(event.request_id)
            if not open_requests:
                inbox.put(Shutdown())

    for command in commands:
        inbox.put(command)
    if not open_requests:
        inbox.put(Shutdown())
    serve(inbox, emit)
    return events


def _of(events: list[Event], kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


def test_every_failing_command_is_answered_by_its_own_event_and_the_loop_goes_on(tiny_gguf: Write, tmp_path: Path) -> None:
    base = str(tiny_gguf())
    missing = str(tmp_path / "none")
    events = _served(
        LoadAdapter(missing), TraceStep(), LoadModel(missing), LoadModel(base), LoadAdapter(missing, "x"), TraceStep(), UnloadAdapter("x"),
        PinAdapter("x", True),
        SetInvocation("x", "y"), SetMix((AdapterUse("x"),)), Abort(4), _generate(1, top_p=7.0), _generate(2))
    assert [event.name for event in _of(events, AdapterFailed)] == ["", "x"]
    assert missing in _of(events, ModelFailed)[0].message
    assert len(_of(events, ModelLoaded)) == 1 and len(_of(events, CommandFailed)) == 3
    assert "'x'" in _of(events, MixRefused)[0].message
    assert [event.request_id for event in _of(events, RequestFailed)] == [1]
    assert [event.request_id for event in _of(events, RequestFinished)] == [2]
    assert [event.message for event in _of(events, TraceFailed)] == [NO_MODEL]
    assert [event.step.step for event in _of(events, StepTraced)] == [1]
    assert not any("Traceback" in str(event) for event in events)


def test_requests_that_run_together_are_refused_together_each_by_its_own_event(tiny_gguf: Write) -> None:
    unknown = Generate(3, TokenIds((5, 6, 7)), (AdapterUse("nobody"),))
    events = _served(
        LoadModel(str(tiny_gguf())), GenerateTogether(()), GenerateTogether((_generate(1), _generate(2), unknown)), _generate(4),
        GenerateTogether((_generate(4), _generate(5))), GenerateTogether((_generate(6), _generate(6))),
        GenerateTogether((_generate(7), _generate(8))), ClearCache())
    failed = {event.request_id: event.message for event in _of(events, RequestFailed)}
    assert failed.keys() == {1, 2, 3, 5, 6} and all("'nobody'" in failed[number] for number in (1, 2, 3))
    assert "request 4 is running already" in failed[5]
    assert [event.message.split(";")[0] for event in _of(events, CommandFailed)] == [
        "no request was given to run together with others", "request 4 is running already", "request 6 is running already"]
    assert {event.request_id for event in _of(events, RequestFinished)} == {4, 7, 8}
    assert [event.because for event in _of(events, CacheCleared)] == ["it was asked for"]


def test_a_load_is_cancelled_by_the_command_behind_it(tiny_gguf: Write) -> None:
    base = str(tiny_gguf())
    events = _served(LoadModel(base), CancelLoad(), LoadModel(base), _generate(1))
    assert [type(event).__name__ for event in events if isinstance(event, (ModelFailed, ModelLoaded))] == ["ModelFailed", "ModelLoaded"]
    assert _of(events, ModelFailed)[0].cancelled and _of(events, RequestFinished)
    assert {event.phase for event in _of(events, ModelLoading)} >= {"header", "tokenizer", "weights", "warm-up"}


def test_a_step_that_breaks_drops_its_requests_and_the_loop_goes_on(tiny_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    real, faults = Engine.step, ["the device has a fault"]

    def step(engine: Engine, *meanwhile: Callable[[], object]) -> bool:
        if engine.snapshot().waiting and faults:
            raise RuntimeError(faults.pop())
        return real(engine, *meanwhile)

    monkeypatch.setattr(Engine, "step", step)
    events: list[Event] = []
    inbox = Inbox()

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, EngineFailed):
            inbox.put(_generate(2))
        if isinstance(event, RequestFinished):
            inbox.put(Shutdown())

    inbox.put(LoadModel(str(tiny_gguf())))
    inbox.put(_generate(1, max_tokens=20))
    serve(inbox, emit)
    (failed,) = _of(events, RequestFailed)
    assert failed.request_id == 1 and "RuntimeError: the device has a fault" in failed.message
    assert not _of(events, EngineFailed)[0].fatal and _of(events, RequestFinished)[0].request_id == 2


def test_the_last_snapshot_shows_what_is(tiny_gguf: Write, adapter_folder: Write) -> None:
    events: list[Event] = []
    inbox, seen = Inbox(), threading.Event()

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, EngineSnapshot) and event.mix and not event.running:
            seen.set()

    loop = threading.Thread(target=serve, args=(inbox, emit))
    loop.start()
    for command in (LoadModel(str(tiny_gguf())), LoadAdapter(str(adapter_folder("one")), "one"), SetMix((AdapterUse("one", 0.5),)),
                    _generate(1)):
        inbox.put(command)
    assert seen.wait(60)
    inbox.put(Shutdown())
    loop.join(30)
    snapshot = _of(events, EngineSnapshot)[-1]
    assert snapshot.mix == (AdapterUse("one", 0.5),) and snapshot.slots[0].adapter == "one" and snapshot.adapters[0].tier == "slot"
    assert snapshot.model is not None and snapshot.kv.blocks > 0 and not snapshot.kv.owners and snapshot.memory_bytes > 0


# -- the child process ---------------------------------------------------------------------------
@contextmanager
def _child(*python: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, *(python or ("-m", "lora_bench.engine"))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            with suppress(OSError):
                pipe.close()


def test_the_child_answers_and_ends_when_its_stdin_closes(tiny_gguf: Write) -> None:
    with _child() as child:
        for command in (LoadModel(str(tiny_gguf())), _generate(1)):
            write_frame(child.stdin, command)
        events = []
        for event in read_events(child.stdout):
            events.append(event)
            if isinstance(event, RequestFinished):
                break
        first, second = _of(events, EngineStarted)
        assert first.pid == child.pid and first.devices == () and second.devices[0] == "cpu"
        assert first.torch == importlib.metadata.version("torch")
        child.stdin.close()
        assert child.wait(30) == 0


def test_prints_of_libraries_do_not_fall_among_the_frames() -> None:
    code = ("import os, sys; import lora_bench.engine.service as s\n"
            "s.serve = lambda inbox, emit: (print('python print', flush=True), os.write(1, b'native print\\n'))\n"
            "from lora_bench.engine.__main__ import main; main()")
    with _child("-c", code) as child:
        events = list(read_events(child.stdout))
        assert [type(event) for event in events] == [EngineStarted, EngineStarted]
        assert {b"python print", b"native print"} == set(child.stderr.read().splitlines())


def test_text_that_is_no_unicode_does_not_break_the_wire(tmp_path: Path) -> None:
    with _child() as child:
        write_frame(child.stdin, LoadModel("\udcff\ud800.gguf"))
        write_frame(child.stdin, Shutdown())
        failed = _of(list(read_events(child.stdout)), ModelFailed)
        assert len(failed) == 1 and ".gguf" in failed[0].message


def test_a_frame_that_is_no_command_ends_the_child_in_words() -> None:
    with _child() as child:
        child.stdin.write(b"\xff\xff\xff\xff")
        child.stdin.flush()
        assert child.wait(30) == 0
        assert b"a frame that is no command" in child.stderr.read()


def test_cores_respect_affinity_and_cgroup(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == usable_cores(tmp_path / "none") >= 1
    code = ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
            "from lora_bench.engine.machine import usable_cores as u; print(u())")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_the_child_survives_an_interrupt_of_the_terminal(tiny_gguf: Write) -> None:
    """Ctrl+C reaches every process of the terminal's group; it is the front end's to act on."""
    with _child() as child:
        events = read_events(child.stdout)
        while not (isinstance(event := next(events), EngineStarted) and event.devices):
            pass
        child.send_signal(signal.SIGINT)
        write_frame(child.stdin, LoadAdapter("none"))
        assert any(isinstance(event, AdapterFailed) for event in events)


def test_adapters_travel(tiny_gguf: Write, adapter_folder: Write) -> None:
    events = _served(LoadModel(str(tiny_gguf())), LoadAdapter(str(adapter_folder("one")), "one"), Generate(
        1, TokenIds((5, 6)), (AdapterUse("one"),), Sampling(max_tokens=2)))
    assert _of(events, AdapterLoaded)[0].adapter.matched == 4 and _of(events, RequestFinished)

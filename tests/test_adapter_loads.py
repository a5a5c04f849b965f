"""Adapters read beside the loop: replies go on, what needs them waits in order, every load can be given up, files are watched."""
from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loop_bench import Loop, ask, running

from lora_bench.engine import watch
from lora_bench.engine.adapter_store import AdapterStore
from lora_bench.engine.protocol import (
    Abort,
    AdapterFailed,
    AdapterFileChanged,
    AdapterLoaded,
    AdapterLoading,
    AdapterReloaded,
    AdapterUnloaded,
    AdapterUse,
    CancelCheck,
    CancelLoad,
    CheckAdapter,
    CheckFailed,
    CheckFinished,
    CheckProgress,
    EngineFailed,
    EngineStarted,
    GenerateTogether,
    LoadAdapter,
    LoadModel,
    MixRefused,
    MixSet,
    ModelFailed,
    ReloadAdapter,
    ReloadFailed,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    RequestStarted,
    SetMix,
    UnloadAdapter,
)
from lora_bench.workbench.backends.local import LocalBackend

Write = Callable[..., Path]


@pytest.fixture
def loop(tiny_gguf: Write) -> Iterator[Loop]:
    with running(LoadModel(str(tiny_gguf()), device="cpu")) as loop:
        yield loop


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads of adapters take until the event is set."""
    gate, real = threading.Event(), AdapterStore.read

    def read(store: AdapterStore, *arguments: object) -> object:
        gate.wait()
        return real(store, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(AdapterStore, "read", read)
    yield gate
    gate.set()


def test_replies_go_on_while_an_adapter_is_read_and_what_needs_it_waits_in_order(
    loop: Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = str(adapter_folder("one"))
    with slow_disk(monkeypatch):
        loop.send(ask(1, tokens=200), LoadAdapter(one, "one"))
        loop.wait(RequestStarted)
        loop.send(ask(2), SetMix((AdapterUse("one"),)), ask(3, "one"), UnloadAdapter("one"), ask(4))
        loop.wait(RequestQueued, 2)  # 3 and 4
        loop.wait(RequestFinished, 2)  # 1 and 2
        assert not loop.of(MixSet) and not loop.of(AdapterLoaded)
        loop.send(Abort(4))
        loop.wait(RequestFinished, 3)
    loop.wait(AdapterUnloaded)
    ended = [(event.request_id, event.reason) for event in loop.of(RequestFinished)]
    assert {number for number, _ in ended[:2]} == {1, 2} and ended[2] == (4, "aborted") and [number for number, _ in ended[3:]] == [3]
    assert [event.request_id for event in loop.of(RequestStarted)] == [1, 2, 3]
    assert not loop.of(RequestFailed) and len(loop.of(MixSet) + loop.of(MixRefused)) == 1
    assert all("is being unloaded" in event.message for event in loop.of(MixRefused)), "it came while the adapter was brought to a slot"


def test_a_group_waits_whole_for_an_adapter_that_is_read_and_loses_the_member_that_is_aborted(
    loop: Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    with slow_disk(monkeypatch):
        loop.send(LoadAdapter(str(adapter_folder("one")), "one"), GenerateTogether((ask(1), ask(2, "one"), ask(3))), Abort(3))
        loop.wait(RequestFinished)
    loop.wait(RequestFinished, 3)
    assert [event.request_id for event in loop.of(RequestQueued)][:3] == [1, 2, 3]
    ended = [(event.request_id, event.reason == "aborted") for event in loop.of(RequestFinished)]
    assert ended[0] == (3, True) and set(ended[1:]) == {(1, False), (2, False)}
    assert {event.request_id for event in loop.of(RequestStarted)} == {1, 2}


def test_a_load_that_hangs_is_given_up_at_once_and_nothing_else_changes(
    loop: Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = (str(adapter_folder(name)) for name in ("one", "two"))
    loop.send(LoadAdapter(one, "one"))
    loop.wait(AdapterLoaded)
    before = loop.now()
    loop.events.clear()
    with slow_disk(monkeypatch):
        loop.send(LoadAdapter(two, "two"), LoadAdapter(two, "three"), ReloadAdapter("one"), ask(1, "two"), CancelLoad())
        loop.wait(RequestFailed)
        failed = loop.of(AdapterFailed)
        assert [(event.name, event.cancelled) for event in failed] == [("two", True), ("three", True)]
        assert failed[0].message == f"{two}: loading was cancelled"
        assert loop.of(ReloadFailed) == [ReloadFailed("one", f"{one}: loading was cancelled", cancelled=True)]
        assert "no adapter 'two' is loaded" in loop.of(RequestFailed)[0].message
        loop.events.clear()
    loop.send(ask(2, "one"), LoadAdapter(two, "two"))  # the disk answers again: what it still brings of before is dropped
    loop.wait(RequestFinished)
    loop.wait(AdapterLoaded)
    loop.send(UnloadAdapter("two"))
    loop.wait(AdapterUnloaded)
    assert loop.of(AdapterLoaded)[0].adapter.name == "two" and len(loop.of(AdapterLoaded)) == 1
    assert [view.info for view in loop.now().adapters] == [view.info for view in before.adapters]


def test_a_base_waits_for_adapters_that_are_read_and_both_are_cancelled_by_one_command(
    loop: Loop, tiny_gguf: Write, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, one = str(tiny_gguf("second.gguf")), str(adapter_folder("one"))
    with slow_disk(monkeypatch) as gate:
        loop.send(LoadAdapter(one, "one"), LoadModel(base, device="cpu"), CancelLoad())
        loop.wait(ModelFailed)
        assert loop.story() == ["AdapterFailed", "ModelFailed"] and loop.of(ModelFailed)[0].cancelled
        loop.send(LoadAdapter(one, "one"), LoadModel(base, device="cpu"), ask(1))
        gate.set()
        loop.wait(RequestFinished)
    assert loop.story()[2:] == ["AdapterLoaded", "AdapterUnloaded", "ModelLoaded", "RequestFinished"]


def test_commands_behind_a_reload_get_the_new_content(loop: Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter_folder("one")
    loop.send(LoadAdapter(str(folder), "one"))
    old = loop.wait(AdapterLoaded).adapter.digest
    adapter_folder("one")
    with slow_disk(monkeypatch):
        loop.send(ReloadAdapter("one"), SetMix((AdapterUse("one", 0.5),)))
        loop.wait(MixSet)  # a scale acts at once
        loop.send(ask(1, "one"))
        loop.wait(RequestQueued)
    loop.wait(RequestFinished)
    reloaded = loop.of(AdapterReloaded)[0]
    assert reloaded.old_digest == old != reloaded.adapter.digest and reloaded.kept_for == ()


def test_a_long_load_tells_how_far_it_is(loop: Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AdapterStore.read

    def read(store: AdapterStore, path: str, name: str | None, progress: Callable[[int, int], None], cancelled: object) -> object:
        def tell(done: int, total: int) -> None:
            progress(done, total)
            time.sleep(0.1)  # a slow disk

        return real(store, path, name, tell, cancelled)  # type: ignore[arg-type]

    monkeypatch.setattr(AdapterStore, "read", read)
    folder = adapter_folder("one")
    loop.send(LoadAdapter(str(folder)))
    loop.wait(AdapterLoaded)
    told = loop.of(AdapterLoading)
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert len(told) >= 2 and {(event.name, event.path, event.total) for event in told} == {("", str(folder), size)}
    assert [event.done for event in told] == sorted(event.done for event in told) and 0 < told[-1].done <= size


def test_eight_loads_of_one_adapter_beside_a_reply_make_one_copy(loop: Loop, adapter_folder: Write) -> None:
    one = str(adapter_folder("one"))
    loop.send(ask(1, tokens=100), *(LoadAdapter(one, "one") for _ in range(8)))
    loop.wait(AdapterLoaded, 8)
    loop.wait(RequestFinished)
    loop.send(ask(2, "one"))
    loop.wait(RequestFinished, 2)
    assert loop.now().host.used_bytes == loop.of(AdapterLoaded)[0].adapter.bytes


def test_a_check_is_stopped_within_a_step_running_or_behind_a_load(
    loop: Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("one", "two"):
        loop.send(LoadAdapter(str(adapter_folder(name)), name))
    loop.wait(AdapterLoaded, 2)
    loop.send(CancelCheck("one"), CheckAdapter("one", True), CheckAdapter("two", True))
    loop.wait(CheckProgress)
    loop.send(CancelCheck("one"), CancelCheck("two"))
    stopped = [CheckFailed(name, "the check was stopped", cancelled=True) for name in ("one", "two")]
    loop.wait(CheckFailed, 2)
    assert loop.of(CheckFailed) == stopped and not loop.of(CheckFinished)
    with slow_disk(monkeypatch):
        loop.send(ReloadAdapter("one"), CheckAdapter("one"), CheckAdapter("two"), CancelCheck("one"))
        assert loop.wait(CheckFailed, 3) == stopped[0]
    assert loop.wait(CheckFinished).name == "two" and loop.of(AdapterReloaded)


def test_the_loop_looks_at_the_files_of_its_adapters(loop: Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.01)
    folder = adapter_folder("one")
    loop.send(LoadAdapter(str(folder), "one"))
    loop.wait(AdapterLoaded)
    (folder / "adapter_model.safetensors").unlink()
    assert loop.wait(AdapterFileChanged) == AdapterFileChanged("one", str(folder), "deleted")
    adapter_folder("one")
    assert loop.wait(AdapterFileChanged, 2).what == "changed"
    loop.send(ReloadAdapter("one"))
    loop.wait(AdapterReloaded)


def test_an_engine_killed_while_it_reads_adapters_is_said_and_the_next_one_reads_them(tiny_gguf: Write, adapter_folder: Write) -> None:
    base, folder = str(tiny_gguf()), str(adapter_folder("one", r=512))
    loop = Loop()  # its events; the loop itself is a child's
    backend = LocalBackend(loop.emit)
    backend.start()
    try:
        backend.send(LoadModel(base, device="cpu"))
        for number in range(40):
            backend.send(LoadAdapter(folder, f"a{number}"))
        loop.wait(AdapterLoaded, 2, seconds=60)
        os.kill(loop.wait(EngineStarted).pid, signal.SIGKILL)
        assert loop.wait(EngineFailed).fatal and len(loop.of(AdapterLoaded)) < 40
        loop.events.clear()
        backend.start()
        backend.send(LoadModel(base, device="cpu"))
        backend.send(LoadAdapter(folder, "a39"))
        assert loop.wait(AdapterLoaded, seconds=60).adapter.name == "a39"
    finally:
        backend.stop()

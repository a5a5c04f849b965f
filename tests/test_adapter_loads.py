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

from lora_bench.engine import fetches, watch
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
    Command,
    EngineFailed,
    EngineSnapshot,
    EngineStarted,
    Event,
    Generate,
    GenerateTogether,
    HostLoaded,
    LoadAdapter,
    LoadModel,
    MixRefused,
    MixSet,
    ModelFailed,
    ModelLoaded,
    ReloadAdapter,
    ReloadFailed,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    RequestStarted,
    Sampling,
    Score,
    Scored,
    SetMix,
    Shutdown,
    SlotLoaded,
    TextDelta,
    TokenIds,
    UnloadAdapter,
)
from lora_bench.engine.service import Inbox, serve
from lora_bench.workbench.backends.local import LocalBackend

Write = Callable[..., Path]


class _Loop:
    """A loop in a thread, and its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = threading.Condition()
        self._inbox = Inbox()
        self.thread = threading.Thread(target=serve, args=(self._inbox, self.emit), daemon=True)

    def emit(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self._inbox.put(command)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type, count: int = 1, seconds: float = 30.0) -> Event:
        """The event number `count` of a kind."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.of(kind)) >= count, seconds), f"no {kind.__name__}: {self.events[-5:]}"
        return self.of(kind)[count - 1]

    def now(self) -> EngineSnapshot:
        """A snapshot that is still to come."""
        return self.wait(EngineSnapshot, len(self.of(EngineSnapshot)) + 1)

    def story(self) -> list[str]:
        """Kinds of all events that end something."""
        ends = (AdapterLoaded, AdapterFailed, AdapterReloaded, ReloadFailed, AdapterUnloaded, MixSet, MixRefused, RequestFinished,
                RequestFailed, ModelLoaded, ModelFailed)
        return [type(event).__name__ for event in self.events if isinstance(event, ends)]


@contextmanager
def _running(load: LoadModel) -> Iterator[_Loop]:
    loop = _Loop()
    loop.thread.start()
    loop.send(load)
    loop.wait(ModelLoaded)
    loop.events.clear()
    yield loop
    loop.send(Shutdown())
    loop.thread.join(10)
    assert not loop.thread.is_alive()


@pytest.fixture
def loop(tiny_gguf: Write) -> Iterator[_Loop]:
    with _running(LoadModel(str(tiny_gguf()), device="cpu")) as loop:
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


def _ask(number: int, *names: str, tokens: int = 4) -> Generate:
    return Generate(number, TokenIds((5, 6, 7)), tuple(AdapterUse(name) for name in names), Sampling(temperature=1.0, max_tokens=tokens))


def test_replies_go_on_while_an_adapter_is_read_and_what_needs_it_waits_in_order(
    loop: _Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = str(adapter_folder("one"))
    with slow_disk(monkeypatch):
        loop.send(_ask(1, tokens=200), LoadAdapter(one, "one"))
        loop.wait(RequestStarted)
        loop.send(_ask(2), SetMix((AdapterUse("one"),)), _ask(3, "one"), UnloadAdapter("one"), _ask(4))
        loop.wait(RequestQueued, 2)  # 3 and 4
        loop.wait(RequestFinished, 2)  # 1 and 2
        assert not loop.of(MixSet) and not loop.of(AdapterLoaded)
        loop.send(Abort(4))
        loop.wait(RequestFinished, 3)
    loop.wait(AdapterUnloaded)
    ended = [(event.request_id, event.reason) for event in loop.of(RequestFinished)]
    assert {number for number, _ in ended[:2]} == {1, 2} and ended[2] == (4, "aborted") and [number for number, _ in ended[3:]] == [3]
    assert [event.request_id for event in loop.of(RequestStarted)] == [1, 2, 3]
    assert not loop.of(RequestFailed) and not loop.of(MixRefused)


def test_a_group_waits_whole_for_an_adapter_that_is_read_and_loses_the_member_that_is_aborted(
    loop: _Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    with slow_disk(monkeypatch):
        loop.send(LoadAdapter(str(adapter_folder("one")), "one"), GenerateTogether((_ask(1), _ask(2, "one"), _ask(3))), Abort(3))
        loop.wait(RequestFinished)
    loop.wait(RequestFinished, 3)
    assert [event.request_id for event in loop.of(RequestQueued)] == [1, 2, 3]
    ended = [(event.request_id, event.reason == "aborted") for event in loop.of(RequestFinished)]
    assert ended[0] == (3, True) and set(ended[1:]) == {(1, False), (2, False)}
    assert {event.request_id for event in loop.of(RequestStarted)} == {1, 2}


def test_a_load_that_hangs_is_given_up_at_once_and_nothing_else_changes(
    loop: _Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = (str(adapter_folder(name)) for name in ("one", "two"))
    loop.send(LoadAdapter(one, "one"))
    loop.wait(AdapterLoaded)
    before = loop.now()
    loop.events.clear()
    with slow_disk(monkeypatch):
        loop.send(LoadAdapter(two, "two"), LoadAdapter(two, "three"), ReloadAdapter("one"), _ask(1, "two"), CancelLoad())
        loop.wait(RequestFailed)
        failed = loop.of(AdapterFailed)
        assert [(event.name, event.cancelled) for event in failed] == [("two", True), ("three", True)]
        assert failed[0].message == f"{two}: loading was cancelled"
        assert loop.of(ReloadFailed) == [ReloadFailed("one", f"{one}: loading was cancelled", cancelled=True)]
        assert "no adapter 'two' is loaded" in loop.of(RequestFailed)[0].message
        loop.events.clear()
    loop.send(_ask(2, "one"), LoadAdapter(two, "two"))  # the disk answers again: what it still brings of before is dropped
    loop.wait(RequestFinished)
    loop.wait(AdapterLoaded)
    loop.send(UnloadAdapter("two"))
    loop.wait(AdapterUnloaded)
    assert loop.of(AdapterLoaded)[0].adapter.name == "two" and len(loop.of(AdapterLoaded)) == 1
    assert [view.info for view in loop.now().adapters] == [view.info for view in before.adapters]


def test_a_base_waits_for_adapters_that_are_read_and_both_are_cancelled_by_one_command(
    loop: _Loop, tiny_gguf: Write, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, one = str(tiny_gguf("second.gguf")), str(adapter_folder("one"))
    with slow_disk(monkeypatch) as gate:
        loop.send(LoadAdapter(one, "one"), LoadModel(base, device="cpu"), CancelLoad())
        loop.wait(ModelFailed)
        assert loop.story() == ["AdapterFailed", "ModelFailed"] and loop.of(ModelFailed)[0].cancelled
        loop.send(LoadAdapter(one, "one"), LoadModel(base, device="cpu"), _ask(1))
        gate.set()
        loop.wait(RequestFinished)
    assert loop.story()[2:] == ["AdapterLoaded", "AdapterUnloaded", "ModelLoaded", "RequestFinished"]


def test_commands_behind_a_reload_get_the_new_content(loop: _Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter_folder("one")
    loop.send(LoadAdapter(str(folder), "one"))
    old = loop.wait(AdapterLoaded).adapter.digest
    adapter_folder("one")
    with slow_disk(monkeypatch):
        loop.send(ReloadAdapter("one"), SetMix((AdapterUse("one", 0.5),)))
        loop.wait(MixSet)  # a scale acts at once
        loop.send(_ask(1, "one"))
        loop.wait(RequestQueued)
    loop.wait(RequestFinished)
    reloaded = loop.of(AdapterReloaded)[0]
    assert reloaded.old_digest == old != reloaded.adapter.digest and reloaded.kept_for == ()


def test_a_long_load_tells_how_far_it_is(loop: _Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_eight_loads_of_one_adapter_beside_a_reply_make_one_copy(loop: _Loop, adapter_folder: Write) -> None:
    one = str(adapter_folder("one"))
    loop.send(_ask(1, tokens=100), *(LoadAdapter(one, "one") for _ in range(8)))
    loop.wait(AdapterLoaded, 8)
    loop.wait(RequestFinished)
    loop.send(_ask(2, "one"))
    loop.wait(RequestFinished, 2)
    assert loop.now().host.used_bytes == loop.of(AdapterLoaded)[0].adapter.bytes


# -- adapters that lie on disk only -----------------------------------------------------------------
FOLDERS = ("one", "two", "three")
ONE, TWO, THREE = ((AdapterUse(name),) for name in FOLDERS)


@pytest.fixture
def few(tiny_talker: Write, adapter_folder: Write) -> Iterator[_Loop]:
    """Two slots and a host tier of one adapter: of three, `three` is there and the others lie on disk only."""
    size, base = 3072, tiny_talker(metadata={"llama.context_length": 8192})
    with _running(LoadModel(str(base), device="cpu", slots=2, host_cache_bytes=size)) as loop:
        for name in FOLDERS:
            loop.send(LoadAdapter(str(adapter_folder(name)), name))
        loop.wait(AdapterLoaded, 3)
        assert {event.adapter.bytes for event in loop.of(AdapterLoaded)} == {size}
        loop.events.clear()
        yield loop


@contextmanager
def slow_fetches(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What lies on disk only is read once the event is set; a read within a step fails."""
    gate, real = threading.Event(), fetches.read_again

    def read(*arguments: object) -> object:
        assert threading.current_thread() is not loop_thread and len(arguments) == 5
        gate.wait(30)
        return real(*arguments)  # type: ignore[arg-type]

    loop_thread = next(thread for thread in threading.enumerate() if getattr(thread, "_target", None) is serve)
    monkeypatch.setattr(fetches, "read_again", read)
    yield gate
    gate.set()


def _endless(number: int, *names: str) -> Generate:
    """A reply that goes on until it is stopped."""
    return Generate(number, TokenIds((5, 6, 7)), tuple(map(AdapterUse, names)), Sampling(temperature=0.0, max_tokens=100_000))


def test_who_needs_an_adapter_of_the_disk_waits_and_the_others_go_on(few: _Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch) as gate:
        few.send(_ask(1, "one"))
        assert few.wait(RequestQueued) == RequestQueued(1, "adapter one is being read from disk")
        for number in range(2, 22):  # more than may pass one that waits for a slot
            few.send(_ask(number, *(["three"] if number % 2 else [])))
            few.wait(RequestFinished, number - 1)
        assert [view.info.name for view in few.now().adapters if view.reading] == ["one"]
        assert [event.request_id for event in few.of(RequestStarted)] == list(range(2, 22))
        gate.set()
        few.wait(RequestFinished, 21)
    assert few.of(RequestFinished)[-1].request_id == 1
    (read,) = [event for event in few.of(HostLoaded) if event.adapter == "one"]
    assert read.because == "request 1, which waits" and few.of(SlotLoaded)[-1].source == "host"


def test_an_adapter_that_cannot_be_read_again_fails_who_needs_it_and_nobody_else(few: _Loop, adapter_folder: Write) -> None:
    adapter_folder("one")  # other content
    path = Path(next(view for view in few.now().adapters if view.info.name == "two").info.path)
    path.rename(path.with_name("away"))
    few.send(_endless(1), _ask(2, "one"), _ask(3, "two"), _ask(4, "three"))
    few.wait(RequestFailed, 2)
    few.wait(RequestStarted, 2)
    told = {event.request_id: event.message for event in few.of(RequestFailed)}
    assert "adapter 'one' is no longer in memory" in told[2] and "has changed since it was loaded; reload it" in told[2]
    assert "adapter 'two' is no longer in memory and cannot be read again" in told[3] and "no such file" in told[3]
    few.send(SetMix(TWO))
    assert "cannot be read again" in few.wait(MixRefused).message
    few.send(ReloadAdapter("one"))
    few.wait(AdapterReloaded)
    few.send(Abort(1), _ask(5, "one"))
    few.wait(RequestFinished, 3)
    assert len(few.of(RequestFailed)) == 2 and {event.request_id for event in few.of(RequestFinished)} == {1, 4, 5}


def test_a_request_is_stopped_while_its_adapter_is_read(few: _Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch) as gate:
        few.send(_ask(1, "one"))
        few.wait(RequestQueued)
        few.send(Abort(1))
        assert few.wait(RequestFinished).reason == "aborted" and not any(view.reading for view in few.now().adapters)
        few.send(_ask(2, "two"))
        few.wait(RequestQueued, 2)
        gate.set()  # the first read comes to its end as well, for nobody
        few.wait(RequestFinished, 2)
    assert [view.info.name for view in few.now().adapters if view.tier == "disk"] == ["one", "three"]
    assert not few.of(RequestFailed) and few.now().host.used_bytes == 3072


def test_a_change_of_the_mix_waits_for_the_disk_and_replies_go_on_meanwhile(few: _Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch) as gate:
        few.send(_endless(1, "three"))
        few.wait(RequestStarted)
        few.send(SetMix(ONE, (1,)), SetMix(TWO, (1,)), SetMix(()))
        few.wait(TextDelta, len(few.of(TextDelta)) + 5)
        assert not few.of(MixSet)
        few.send(_ask(2), _ask(3, "three"))
        gate.set()
        few.wait(MixSet, 2)
    assert [event.mix for event in few.of(MixSet)] == [TWO, ()], "what was replaced before it acted is not told"
    assert few.of(MixSet)[0].at_token.keys() == {1} and few.of(MixSet)[0].at_token[1] > 0
    few.send(SetMix(THREE, (1,)), SetMix((), (1,)))  # it need not wait for a mix that it replaces
    few.wait(MixSet, 3)
    few.send(Abort(1))
    few.wait(RequestFinished, 3)
    assert not few.of(RequestFailed) and not few.of(MixRefused)


def test_another_base_and_an_unload_end_what_waits_for_the_disk(few: _Loop, tiny_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch):
        few.send(SetMix(ONE), UnloadAdapter("one"))
        assert "no adapter 'one' is loaded" in few.wait(MixRefused).message
        few.send(SetMix(TWO), _ask(1, "two"))
        few.wait(RequestQueued)
        few.send(LoadModel(str(tiny_gguf("second.gguf")), device="cpu"))
        few.wait(ModelLoaded)
    assert few.of(MixRefused)[-1].message == few.of(RequestFailed)[0].message == "the base was unloaded: another base was loaded"


def test_a_text_is_scored_once_the_adapters_of_its_mixes_are_read(few: _Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch) as gate:
        few.send(Score(1, TokenIds((5, 6, 7)), (8, 9), ((), ONE)), _ask(1, "three"))
        few.wait(RequestFinished)
        assert not few.of(Scored)
        gate.set()
        few.wait(Scored)
    (read,) = [event for event in few.of(HostLoaded) if event.adapter == "one"]
    assert read.because == "the reading of a text"


def test_a_check_is_stopped_within_a_step_running_or_behind_a_load(
    loop: _Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
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


def test_the_loop_looks_at_the_files_of_its_adapters(loop: _Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch) -> None:
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
    loop = _Loop()  # its events; the loop itself is a child's
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

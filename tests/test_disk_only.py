"""Adapters that lie on disk only are read beside the loop for those who wait for them; nobody else waits."""
from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loop_bench import Loop, ask, running

from lora_bench.engine import fetches, report, tiers
from lora_bench.engine.protocol import (
    Abort,
    AdapterLoaded,
    AdapterReloaded,
    AdapterUse,
    CheckAdapter,
    CheckFailed,
    CheckFinished,
    EngineFailed,
    Generate,
    GenerateTogether,
    HostLoaded,
    LoadAdapter,
    LoadModel,
    MixRefused,
    MixSet,
    ModelLoaded,
    ReloadAdapter,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    RequestStarted,
    Sampling,
    Score,
    Scored,
    ScoreFailed,
    SetMix,
    SlotLoaded,
    TextDelta,
    TokenIds,
    UnloadAdapter,
)
from lora_bench.engine.service import serve

Write = Callable[..., Path]
FOLDERS = ("one", "two", "three")
ONE, TWO, THREE = ((AdapterUse(name),) for name in FOLDERS)


@pytest.fixture
def few(tiny_talker: Write, adapter_folder: Write) -> Iterator[Loop]:
    """Two slots and a host tier of one adapter: of three, `three` is there and the others lie on disk only."""
    size, base = 3072, tiny_talker(metadata={"llama.context_length": 8192})
    with running(LoadModel(str(base), device="cpu", slots=2, host_cache_bytes=size)) as loop:
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


def test_who_needs_an_adapter_of_the_disk_waits_and_the_others_go_on(few: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch) as gate:
        few.send(ask(1, "one"))
        assert few.wait(RequestQueued) == RequestQueued(1, "adapter one is being read from disk")
        for number in range(2, 22):  # more than may pass one that waits for a slot
            few.send(ask(number, *(["three"] if number % 2 else [])))
            few.wait(RequestFinished, number - 1)
        assert [view.info.name for view in few.now().adapters if view.reading] == ["one"]
        assert [event.request_id for event in few.of(RequestStarted)] == list(range(2, 22))
        gate.set()
        few.wait(RequestFinished, 21)
    assert few.of(RequestFinished)[-1].request_id == 1
    (read,) = [event for event in few.of(HostLoaded) if event.adapter == "one"]
    assert read.because == "request 1, which waits" and few.of(SlotLoaded)[-1].source == "host"


def test_an_adapter_that_cannot_be_read_again_fails_who_needs_it_and_nobody_else(few: Loop, adapter_folder: Write) -> None:
    adapter_folder("one")  # other content
    path = Path(next(view for view in few.now().adapters if view.info.name == "two").info.path)
    path.rename(path.with_name("away"))
    few.send(_endless(1), ask(2, "one"), ask(3, "two"), ask(4, "three"))
    few.wait(RequestFailed, 2)
    few.wait(RequestStarted, 2)
    told = {event.request_id: event.message for event in few.of(RequestFailed)}
    assert "adapter 'one' is no longer in memory" in told[2] and "has changed since it was loaded; reload it" in told[2]
    assert "adapter 'two' is no longer in memory and cannot be read again" in told[3] and "no such file" in told[3]
    few.send(SetMix(TWO))
    assert "cannot be read again" in few.wait(MixRefused).message
    few.send(ReloadAdapter("one"))
    few.wait(AdapterReloaded)
    few.send(Abort(1), ask(5, "one"))
    few.wait(RequestFinished, 3)
    assert len(few.of(RequestFailed)) == 2 and {event.request_id for event in few.of(RequestFinished)} == {1, 4, 5}


def test_a_request_is_stopped_while_its_adapter_is_read(few: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch) as gate:
        few.send(ask(1, "one"))
        few.wait(RequestQueued)
        few.send(Abort(1))
        assert few.wait(RequestFinished).reason == "aborted" and not any(view.reading for view in few.now().adapters)
        few.send(ask(2, "two"))
        few.wait(RequestQueued, 2)
        gate.set()  # the first read comes to its end as well, for nobody
        few.wait(RequestFinished, 2)
    assert [view.info.name for view in few.now().adapters if view.tier == "disk"] == ["one", "three"]
    assert not few.of(RequestFailed) and few.now().host.used_bytes == 3072


def test_a_change_of_the_mix_waits_for_the_disk_and_replies_go_on_meanwhile(few: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch) as gate:
        few.send(_endless(1, "three"))
        few.wait(RequestStarted)
        few.send(SetMix(ONE, (1,)), SetMix(TWO, (1,)), SetMix(()))
        few.wait(TextDelta, len(few.of(TextDelta)) + 5)
        assert not few.of(MixSet)
        few.send(ask(2), ask(3, "three"))
        gate.set()
        few.wait(MixSet, 2)
    assert [event.mix for event in few.of(MixSet)] == [TWO, ()], "what was replaced before it acted is not told"
    assert few.of(MixSet)[0].at_token.keys() == {1} and few.of(MixSet)[0].at_token[1] > 0
    few.send(SetMix(THREE, (1,)), SetMix((), (1,)))  # it need not wait for a mix that it replaces
    few.wait(MixSet, 3)
    few.send(Abort(1))
    few.wait(RequestFinished, 3)
    assert not few.of(RequestFailed) and not few.of(MixRefused)


def test_another_base_and_an_unload_end_what_waits_for_the_disk(few: Loop, tiny_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch):
        few.send(SetMix(ONE), UnloadAdapter("one"))
        assert "no adapter 'one' is loaded" in few.wait(MixRefused).message
        few.send(SetMix(TWO), ask(1, "two"))
        few.wait(RequestQueued)
        few.send(LoadModel(str(tiny_gguf("second.gguf")), device="cpu"))
        few.wait(ModelLoaded)
    assert few.of(MixRefused)[-1].message == few.of(RequestFailed)[0].message == "the base was unloaded: another base was loaded"


def test_a_text_is_scored_once_the_adapters_of_its_mixes_are_read(few: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_fetches(monkeypatch) as gate:
        few.send(Score(1, TokenIds((5, 6, 7)), (8, 9), ((), ONE)), ask(1, "three"))
        few.wait(RequestFinished)
        assert not few.of(Scored)
        gate.set()
        few.wait(Scored)
    (read,) = [event for event in few.of(HostLoaded) if event.adapter == "one"]
    assert read.because == "the reading of a text"


@contextmanager
def slow_work(monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> Iterator[list[str]]:
    """Reads and what makes adapters ready take a while. What the thread of the loop does of it itself is listed."""
    loop_thread = next(thread for thread in threading.enumerate() if getattr(thread, "_target", None) is serve)
    found: list[str] = []

    def slow(what: str, real: Callable[..., object]) -> Callable[..., object]:
        def work(*arguments: object) -> object:
            if threading.current_thread() is loop_thread:
                found.append(what)
            time.sleep(draw.choice((0.0, 0.001, 0.02)))
            return real(*arguments)
        return work

    monkeypatch.setattr(fetches, "read_again", slow("a file was read", fetches.read_again))
    monkeypatch.setattr(tiers, "build_content", slow("an adapter was made ready", tiers.build_content))
    monkeypatch.setattr(report, "inspect_path", slow("a header was read", report.inspect_path))
    yield found


@pytest.mark.parametrize("_", range(2))
def test_the_loop_neither_reads_nor_makes_ready_whatever_is_asked_of_it(
        _: int, few: Loop, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw, requests, scores, checks = random.Random(seed), 0, 0, 0
    with slow_work(monkeypatch, draw) as found:
        for _ in range(40):
            mix = tuple(AdapterUse(name, draw.choice((0.5, 1.0, 1.0, 0.0))) for name in draw.sample(FOLDERS, draw.randint(0, 2)))
            match draw.choice(("ask", "ask", "together", "mix", "mix", "score", "check", "reload", "abort", "wait")):
                case "ask":
                    requests += 1
                    few.send(Generate(requests, TokenIds((5, 6, 7)), mix, Sampling(temperature=1.0, max_tokens=draw.randint(1, 60))))
                case "together":
                    other = tuple(map(AdapterUse, draw.sample(FOLDERS, 1)))
                    few.send(GenerateTogether(tuple(
                        Generate(requests + 1 + i, TokenIds((5, 6, 7)), one, Sampling(temperature=1.0, max_tokens=30))
                        for i, one in enumerate((mix[:1], other)))))
                    requests += 2
                case "mix":
                    some = tuple(draw.sample(range(1, requests + 1), min(requests, draw.randint(0, 3))))
                    few.send(SetMix(mix, some, draw.choice(("splice", "recompute", "finish"))))
                case "score":
                    scores += 1
                    few.send(Score(scores, TokenIds((5, 6, 7)), (8, 9, 10), ((), *((AdapterUse(name),) for name in FOLDERS), mix)))
                case "check":
                    checks += 1
                    few.send(CheckAdapter(draw.choice(FOLDERS), effect=draw.random() < 0.5))
                case "reload":
                    few.send(ReloadAdapter(draw.choice(FOLDERS)))
                case "abort" if requests:
                    few.send(Abort(draw.randint(1, requests)))
                case _:
                    few.now()
        few.wait_until(lambda: len(few.of(RequestFinished) + few.of(RequestFailed)) >= requests)
        few.wait_until(lambda: len(few.of(Scored) + few.of(ScoreFailed)) >= scores)
        few.wait_until(lambda: not checks or len(few.of(CheckFinished) + few.of(CheckFailed)) > 0)
    assert not found and not few.of(EngineFailed)
    failed = [event.message for kind in (RequestFailed, ScoreFailed, CheckFailed, MixRefused) for event in few.of(kind)]
    assert not [message for message in failed if "made ready" in message or "cannot be" in message and "cannot be had now" not in message]

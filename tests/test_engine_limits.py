"""What people and files may ask for, and must be refused in words: numbers at their ends, numbers twice, memory that is not there."""
from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from engine_bench import PROMPT, Bench

from lora_bench.engine import config
from lora_bench.engine.adapter_store import AdapterStore
from lora_bench.engine.engine import Engine
from lora_bench.engine.failures import OutOfMemory, out_of_memory, sentence
from lora_bench.engine.protocol import (
    MAX_FRAME_BYTES,
    AdapterUse,
    Chat,
    CommandFailed,
    Event,
    Generate,
    LoadModel,
    Message,
    MixSet,
    RawText,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    RequestStarted,
    Sampling,
    Shutdown,
    TokenIds,
    write_frame,
)
from lora_bench.engine.service import Inbox, serve
from lora_bench.engine.tokenizer import Tokenizer

Write = Callable[..., Path]


@pytest.mark.parametrize("settings,words", [
    ({"repetition_penalty": 1e308}, "repetition_penalty is 1e\\+308; it must be from 0.01 to 100"), ({"repetition_penalty": 1e-40}, "0.01"),
    ({"stop": ("",)}, "a stop string has 0 characters; it must have 1 to 1000"), ({"stop": ("x" * 1001,)}, "1001 characters"),
    ({"stop": ("x",) * 65}, "65 stop strings are given; at most 64"), ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
    ({"temperature": float("inf")}, "temperature is inf"), ({"top_k": -1}, "top_k is -1"),
])
def test_settings_beyond_their_bounds_are_refused(base: Path, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Bench(base).submit(1, **settings)


@pytest.mark.parametrize("settings", [{"temperature": 1e-308}, {"temperature": 5e-324}, {"top_k": 2**63}, {"max_tokens": 2**62}, {
    "temperature": 9.0, "min_p": 1.0, "seed": 2**63}, {"temperature": 9.0, "top_p": 1e-300, "seed": -1}, {"stop": ("\ud800", "é")}])
def test_settings_at_their_ends_that_leave_only_the_best_token_are_greedy(base: Path, settings: dict) -> None:
    bench = Bench(base)
    bench.submit(1)
    bench.submit(2, **settings)
    bench.run()
    assert bench.ids(2)[: len(bench.ids(1))] == bench.ids(1)


@pytest.mark.parametrize("prompt", [RawText("the " * 5000), Chat((Message("user", "a" * 20_000),), "x"), Chat((Message("", ""),) * 20_000)])
def test_a_text_far_too_long_is_refused_before_it_is_tokenised(base: Path, prompt: object, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(base)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was tokenised"))
    with pytest.raises(ValueError, match="characters, too many for the context of 256 tokens"):
        bench.submit(1, prompt, max_tokens=1)


def test_a_long_request_is_not_overtaken_and_one_slot_serves_four_mixes(base: Path, adapter_folder: Write) -> None:
    bench = Bench(base, slots=1)
    for number in range(4):
        bench.engine.load_adapter(str(adapter_folder(f"a{number}", r=1 + number)), f"a{number}")
    mixes = [(AdapterUse(f"a{number}"),) for number in range(4)]
    for number, mix in enumerate(mixes):
        bench.submit(number, mix=mix, max_tokens=4)
        bench.run()
    alone = [bench.ids(number) for number in range(4)]
    bench.events.clear()
    for number in range(3):
        bench.submit(number, TokenIds((5,) * 200), max_tokens=50)
    bench.submit(3, TokenIds((5,) * 250), max_tokens=100)
    bench.submit(4, TokenIds((5,) * 250), max_tokens=100)
    for number in range(5, 13):
        bench.submit(number, mix=mixes[number % 4], max_tokens=4)
        bench.run(1)
    bench.run()
    started = [event.request_id for event in bench.of(RequestStarted)]
    assert started[:6] == [0, 1, 2, 3, 4, 5], "first come, first served"
    assert started[6:] == [6, 10, 7, 11, 8, 12, 9], "one whose adapter is in the slot passes those that wait for the slot"
    assert [bench.ids(number) for number in range(8, 12)] == alone
    told = [event.because for event in bench.of(RequestQueued) if event.request_id == 7]
    assert told[0] == "its turn comes after request 6" and "1 slots" in told[-1] and told.count(told[0]) == 1


@pytest.mark.parametrize("load,words", [
    ({"path": ""}, "has no config.json|no such file"), ({"slots": 10**9}, "1000000000 slots were asked for; choose 1 to 256"),
    ({"host_cache_bytes": -1}, "-1 bytes")])
def test_loads_that_cannot_be_are_refused_at_once(base: Path, load: dict, words: str) -> None:
    with pytest.raises((ValueError, OSError), match=words):
        Engine(lambda event: None).load_model(LoadModel(**{"path": str(base)} | load))


def test_a_base_gets_the_memory_that_is_there_or_says_what_is_missing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Bench(base)
    info = loaded.engine.model.info
    token = 2 * 2 * 12 * 4  # keys and values, two layers, two heads of 6, fp32
    assert not info.notes and info.context == 256

    def free(spare: int) -> None:
        monkeypatch.setattr(config, "_free_bytes", lambda device: 4 * info.parameters + spare)

    free(4 * 100 * token)
    short = loaded.engine.load_model(LoadModel(str(base), "cpu"))
    assert short.context == 96
    assert short.notes == ("the context is 96 tokens instead of 256: no more fit into 25% of the memory that is free",)
    assert not loaded.engine.load_model(LoadModel(str(base), "cpu", context=96)).notes
    with pytest.raises(OutOfMemory, match=f"{base}: {400 * token:,} bytes of memory are free on cpu beside the weights, "
                                          "too few for .* 112 tokens"):
        loaded.engine.load_model(LoadModel(str(base), "cpu", context=112))
    assert loaded.engine.model.info.context == 96, "what was loaded stays"
    free(-1)
    with pytest.raises(OutOfMemory, match=f"{base}: its weights take {4 * info.parameters:,} bytes as fp32, "
                                          f"{4 * info.parameters - 1:,} bytes"):
        loaded.engine.load_model(LoadModel(str(base), "cpu"))
    assert loaded.engine.snapshot().model is None, "it made room"


def test_a_number_that_is_taken_is_refused_and_its_request_goes_on(base: Path) -> None:
    events: list[Event] = []
    inbox = Inbox()
    for command in (LoadModel(str(base)), *(Generate(1, PROMPT, (), Sampling(max_tokens=3)) for _ in range(2))):
        inbox.put(command)

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, RequestFinished):
            inbox.put(Shutdown())

    serve(inbox, emit)
    (refused,) = [event for event in events if isinstance(event, CommandFailed)]
    assert "request 1 is running already" in refused.message and not any(isinstance(event, RequestFailed) for event in events)


def test_memory_that_runs_out_for_one_request_fails_that_one_alone(
    base: Path, adapter_folder: Write, monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(base)
    bench.engine.load_adapter(str(adapter_folder("one")), "one")
    real = AdapterStore.exchange

    def exchange(store: AdapterStore, wanted: Mapping[int, Sequence[str]], waiting: object, because: str) -> object:
        if 2 in wanted:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: "
                               "you tried to allocate 4096 bytes.")
        return real(store, wanted, waiting, because)

    monkeypatch.setattr(AdapterStore, "exchange", exchange)
    for number in (1, 2, 3):
        bench.submit(number, mix=(AdapterUse("one"),), max_tokens=3)
    bench.run()
    (failed,) = bench.of(RequestFailed)
    assert failed.request_id == 2 and failed.out_of_memory and bench.ids(1) == bench.ids(3)
    assert failed.message.startswith("memory ran out when 4096 bytes more were asked for: the engine holds ")
    assert "enforce" not in failed.message and "bytes, " in failed.message


def test_memory_errors_are_told_from_others() -> None:
    assert out_of_memory(MemoryError()) and sentence(MemoryError()).startswith("memory ran out: the engine holds")
    assert not out_of_memory(RuntimeError("a fault")) and sentence(RuntimeError("a fault")) == "RuntimeError: a fault"


def test_a_refused_mix_changes_nothing_though_the_file_of_an_old_one_is_gone(
    base: Path, adapter_folder: Write,
) -> None:
    folders = {name: adapter_folder(name) for name in ("one", "two", "held", "three", "sure", "surer")}
    bench = Bench(base, slots=3, host_cache_bytes=3072)
    for name, folder in folders.items():
        assert bench.engine.load_adapter(str(folder), name).bytes == 3072, "the host tier holds one of them"
    bench.engine.set_invocation("sure", "cd")
    bench.engine.set_invocation("surer", "d")
    bench.submit(1, TokenIds((5, 6, 7)), (AdapterUse("one"),))
    bench.submit(2, PROMPT, (AdapterUse("two"),))
    bench.submit(3, PROMPT, (AdapterUse("held"),))
    bench.run(2)
    shutil.rmtree(folders["one"])
    with pytest.raises(ValueError, match="the mix needs 3 more of 3 slots, 2 can be had now; the rest are held by request 3"):
        bench.engine.set_mix((AdapterUse("three"), AdapterUse("sure"), AdapterUse("surer")), (1, 2))
    assert not bench.of(RequestFailed) and not bench.of(MixSet)
    assert [owner.mix for owner in bench.engine.snapshot().kv.owners] == [(AdapterUse(name),) for name in ("one", "two", "held")]
    bench.run()
    assert [len(bench.ids(number)) for number in (1, 2, 3)] == [20, 20, 20]


def test_frames_that_cannot_be_sent_are_refused_before_a_byte_is_written() -> None:
    for command in (Generate(1, RawText("x" * MAX_FRAME_BYTES)), Generate(1, PROMPT, (), Sampling(top_k=1 << 70))):
        stream = io.BytesIO()
        with pytest.raises(ValueError, match="Generate"):
            write_frame(stream, command)
        assert stream.getvalue() == b""
    stream = io.BytesIO()
    write_frame(stream, Generate(1, RawText("\udc00")))
    assert msgspec.msgpack.decode(stream.getvalue()[4:])["prompt"]["text"] == "?"

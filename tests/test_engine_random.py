"""Hundreds of random commands: nothing leaks, every request ends once, and a reply is what it would have been alone."""
from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from peft_files import edit
from torch import Tensor

from lora_bench.engine.adapters.peft import SAFETENSORS
from lora_bench.engine.engine import Engine
from lora_bench.engine.models.facts import ModelFacts, module_shapes
from lora_bench.engine.protocol import (
    Abort,
    AdapterUse,
    CancelLoad,
    ClearCache,
    Command,
    EngineFailed,
    EngineSnapshot,
    Event,
    Generate,
    GenerateTogether,
    InvocationFired,
    LoadAdapter,
    LoadModel,
    Mix,
    PinAdapter,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestStarted,
    Sampling,
    SetInvocation,
    SetMix,
    Shutdown,
    TextDelta,
    TokenIds,
    UnloadAdapter,
    read_events,
    write_frame,
)

Write = Callable[..., Path]
NAMES = ("one", "two", "three", "four")
SLOTS = 2
"""too few for all adapters"""


@pytest.fixture(params=["plain", "every kind"])
def files(request: pytest.FixtureRequest, tiny_gguf: Write, adapter_folder: Write, tiny_facts: ModelFacts) -> dict[str, str]:
    """The base by "base", the adapters by their names."""
    kinds = (("q_proj", "down_proj"), ("v_proj", "lm_head"), ("q_proj", "k_proj", "v_proj", "o_proj"), ("up_proj",))
    folders = {name: adapter_folder(name, kind, r=2 + number) for number, (name, kind) in enumerate(zip(NAMES, kinds, strict=True))}
    if request.param == "every kind":
        _extend(folders, tiny_facts)
    return {name: str(folder) for name, folder in folders.items()} | {"base": str(tiny_gguf())}


def _extend(folders: dict[str, Path], facts: ModelFacts) -> None:
    """DoRA to the first, whole norms, embedding and head to the second, LoRA on the embedding and its bias to the third."""
    shapes = module_shapes(facts)

    def magnitudes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        paths = [name.removesuffix(".lora_B.weight") for name in tensors if "lora_B" in name]
        return {f"{path}.lora_magnitude_vector": torch.rand(shapes[path.removeprefix("base_model.model.model.")][0]) + 4 for path in paths}

    edit(folders["one"], lambda tensors: tensors.update(magnitudes(tensors)), use_dora=True)
    whole = {"model.embed_tokens": (facts.vocab, facts.hidden), "lm_head": (facts.vocab, facts.hidden), "model.norm": (facts.hidden,)}
    edit(folders["two"], lambda tensors: [tensors.pop(name) for name in list(tensors) if "lm_head" in name]
         + [tensors.update({f"base_model.model.{path}.weight": torch.randn(shape) for path, shape in whole.items()})],
         target_modules=["v_proj"], modules_to_save=[*whole])
    embedding = {"A": torch.randn(4, facts.vocab), "B": torch.randn(facts.hidden, 4)}
    edit(folders["three"], lambda tensors: tensors.update(
        {f"base_model.model.model.embed_tokens.lora_embedding_{half}": tensor for half, tensor in embedding.items()}
        | {name.replace("weight", "bias"): torch.randn(tensor.shape[0]) for name, tensor in tensors.items() if "lora_B" in name}),
         lora_bias=True, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens"])


def _host_bytes(files: dict[str, str]) -> int:
    """Of a host tier for about two of the adapters."""
    return sum((Path(files[name]) / SAFETENSORS).stat().st_size for name in NAMES) // 2


class Commands:
    """Random commands; requests are numbered from 1."""

    def __init__(self, seed: int, files: dict[str, str]) -> None:
        self.random, self.files, self.requests = random.Random(seed), files, 0

    def mix(self) -> Mix:
        names = self.random.sample(NAMES, self.random.choice((0, 1, 1, 2, 2, 3)))
        return tuple(AdapterUse(name, self.random.choice((0.0, 0.3, 1.0, -0.5))) for name in names)

    def generate(self) -> Generate:
        draw = self.random
        self.requests += 1
        prompt = tuple(draw.randrange(5, 50) for _ in range(draw.choice((1, 3, 20, 60, 180))))
        hot = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2} if draw.random() < 0.2 else {}
        limit = draw.choice((1, 2, 6, 300))
        return Generate(self.requests, TokenIds(prompt), self.mix(), Sampling(max_tokens=limit, seed=self.requests, **hot))

    def together(self) -> GenerateTogether:
        return GenerateTogether(tuple(self.generate() for _ in range(self.random.choice((2, 3)))))

    def set_mix(self, number: int) -> SetMix:
        draw = self.random
        return SetMix(self.mix(), tuple(draw.sample(range(number + 1), min(3, number))), draw.choice(("splice", "recompute", "finish")))

    def any(self) -> Command:
        draw = self.random
        name, number = draw.choice(NAMES), draw.randint(1, self.requests + 1)
        make = draw.choices((
            self.generate, self.together, ClearCache, lambda: Abort(number), lambda: self.set_mix(number),
            lambda: LoadAdapter(self.files[name], name), lambda: UnloadAdapter(name), lambda: PinAdapter(name, draw.random() < 0.4),
            lambda: SetInvocation(name, draw.choice(("", "", "a", "zzz")), draw.random() < 0.5)), (6, 1, 1, 4, 4, 4, 1, 1, 1))[0]
        return make()


@dataclass
class Asked:
    """A request as it was accepted, and the invocations of that moment."""

    command: Generate
    invocations: dict[str, tuple[str, bool]]
    changed: bool = False


@dataclass
class Run:
    """An engine under random commands."""

    files: dict[str, str]
    events: list[Event] = field(default_factory=list)
    asked: dict[int, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = Engine(self.events.append)
        self.engine.load_model(LoadModel(self.files["base"], "cpu", slots=SLOTS, host_cache_bytes=_host_bytes(self.files)))

    def do(self, command: Command) -> None:
        engine = self.engine
        with suppress(ValueError):
            match command:
                case Generate() | GenerateTogether():
                    requests = command.requests if isinstance(command, GenerateTogether) else (command,)
                    engine.submit_together(GenerateTogether(requests))
                    invocations = {name: (info.invocation, info.invocation_in_reply) for name, info in engine.model.store.infos.items()}
                    self.asked |= {request.request_id: Asked(request, invocations) for request in requests}
                case ClearCache():
                    engine.clear_cache()
                case Abort(number):
                    engine.abort(number)
                case SetMix(mix, numbers, change):
                    before = {owner.request_id: owner.mix for owner in engine.snapshot().kv.owners}
                    engine.set_mix(mix, numbers, change)
                    for number in set(numbers) & self.asked.keys():
                        self.asked[number].changed |= before.get(number) != mix
                case LoadAdapter(path, name):
                    engine.load_adapter(path, name)
                case UnloadAdapter(name):
                    engine.unload_adapter(name)
                case PinAdapter(name, pinned):
                    engine.pin_adapter(name, pinned)
                case SetInvocation(name, text, in_reply):
                    engine.set_invocation(name, text, in_reply)

    def check(self) -> None:
        snapshot, model = self.engine.snapshot(), self.engine.model
        blocks = [block for request in model.scheduler.running for block in request.table.blocks]
        assert model.memory.free + len(set(blocks)) == snapshot.kv.blocks and snapshot.kv.held == len(set(blocks))
        assert len(blocks) == sum(owner.blocks for owner in snapshot.kv.owners)
        ended = [event.request_id for event in self.events if isinstance(event, (RequestFinished, RequestFailed))]
        assert len(ended) == len(set(ended))
        assert set(ended).isdisjoint(alive := {*snapshot.running, *snapshot.waiting}) and {*ended, *alive} == self.asked.keys()
        in_slots = [slot.adapter for slot in snapshot.slots if slot.adapter]
        assert len(in_slots) == len(set(in_slots)) and len(snapshot.slots) == SLOTS
        assert {view.info.name for view in snapshot.adapters} >= {*in_slots, *snapshot.host.adapters}
        assert snapshot.host.used_bytes <= _host_bytes(self.files)
        for slot in snapshot.slots:
            holders = [request for request in (*model.scheduler.running, *model.scheduler.waiting) if request.started]
            now, ever = (sum(slot.adapter in names for names in found)
                         for found in ([request.mix.names for request in holders], [request.history.names for request in holders]))
            assert now <= slot.users <= ever

    def finish(self) -> None:
        while self.engine.step():
            pass
        self.check()
        snapshot = self.engine.snapshot()
        assert not snapshot.running and not snapshot.waiting and not snapshot.kv.owners and all(slot.users == 0 for slot in snapshot.slots)

    def alone(self, asked: Asked) -> tuple[int, ...]:
        for name in {use.name for use in asked.command.mix}:
            self.do(LoadAdapter(self.files[name], name))
            self.engine.set_invocation(name, *asked.invocations[name])
        self.events.clear()
        self.engine.submit(asked.command)
        while self.engine.step():
            pass
        (done,) = [event for event in self.events if isinstance(event, RequestFinished)]
        return done.ids

    def same(self, asked: Asked, ids: Sequence[int], other: Sequence[int]) -> bool:
        """Equal, or parted where the two best tokens are as good as equal: a batch may round otherwise."""
        if tuple(ids) == tuple(other):
            return True
        at = next(i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
        best = self.engine.logits([*asked.command.prompt.ids, *ids[:at]], asked.command.mix).topk(2).values
        return bool(best[0] - best[1] < 1e-3 * best[0].abs())


@pytest.mark.parametrize("count", [250])
def test_random_commands_leak_nothing_and_change_no_reply(files: dict[str, str], seed: int, count: int) -> None:
    commands, run = Commands(seed, files), Run(files)
    for name in NAMES[:3]:
        run.do(LoadAdapter(files[name], name))
    for _ in range(count):
        run.do(commands.any())
        for _ in range(commands.random.choice((0, 0, 1, 3))):
            run.engine.step()
        run.check()
    run.finish()
    finished = [event for event in run.events if isinstance(event, RequestFinished) and event.reason != "aborted"]
    assert finished
    for name in NAMES:
        run.do(PinAdapter(name, False))
    kept = [(run.asked[event.request_id], event.ids) for event in finished]
    greedy = [(asked, ids) for asked, ids in kept if not asked.changed and asked.command.sampling.temperature == 0]
    for asked, ids in commands.random.sample(greedy, min(8, len(greedy))):
        alone = run.alone(asked)
        assert run.same(asked, ids, alone), (asked, ids, alone)


def test_the_child_ends_every_request_once_whatever_comes(files: dict[str, str], seed: int) -> None:
    """All commands at once, without waiting: loads of a base, its cancelling, and what people do in between."""
    commands = Commands(seed, files)
    base = LoadModel(files["base"], "cpu", slots=SLOTS, host_cache_bytes=_host_bytes(files))
    sent: list[Command] = [base, *(LoadAdapter(files[name], name) for name in NAMES)]
    sent += [commands.any() for _ in range(100)]
    sent += [base, CancelLoad(), *(commands.any() for _ in range(10)), base, LoadAdapter(files["one"], "one")]
    sent += [commands.generate(), Generate(10_000, TokenIds((5,)), (), Sampling(max_tokens=3))]
    child = subprocess.Popen([sys.executable, "-m", "lora_bench.engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        for command in sent:
            write_frame(child.stdin, command)
        asked = {request.request_id for command in sent if isinstance(command, (Generate, GenerateTogether))
                 for request in (command.requests if isinstance(command, GenerateTogether) else (command,))}
        events = _events_until_idle(child, asked)
        write_frame(child.stdin, Shutdown())
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()
    assert not any(isinstance(event, EngineFailed) for event in events)
    for number in asked:
        _check_order([event for event in events if getattr(event, "request_id", None) == number])


def _events_until_idle(child: subprocess.Popen, asked: set[int]) -> list[Event]:
    """All events up to a snapshot that shows nothing running, after the last of `asked` ended."""
    events, left = [], set(asked)
    for event in read_events(child.stdout):
        events.append(event)
        if isinstance(event, (RequestFinished, RequestFailed)):
            left.discard(event.request_id)
        if not left and isinstance(event, EngineSnapshot):
            assert not event.running and not event.waiting and not event.kv.owners and not any(slot.users for slot in event.slots)
            return events
    raise AssertionError(f"the child ended with {left} open")


def _check_order(events: list[Event]) -> None:
    """Queued, started, text, one end; from the beginning again after each preemption."""
    ranks = {RequestQueued: 0, RequestStarted: 1, TextDelta: 2, InvocationFired: 2, RequestFinished: 3, RequestFailed: 3}
    turns: list[list[int]] = [[]]
    for event in events:
        if isinstance(event, RequestPreempted):
            assert 1 in turns[-1]
            turns.append([])
        else:
            turns[-1].append(ranks[type(event)])
    for turn in turns:
        assert turn == sorted(turn) and turn.count(1) <= 1
        assert turn.count(1) == 1 or 2 not in turn
    assert [turn.count(3) for turn in turns] == [0] * (len(turns) - 1) + [1]

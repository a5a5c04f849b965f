"""The engine against transformers + PEFT and llama.cpp on the default base: token ids, logits, greedy replies, aLoRAs, mixed batches."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import (
    AdapterUse,
    Chat,
    Event,
    Generate,
    LoadModel,
    Message,
    Mix,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    Sampling,
    StepFinished,
    TokenIds,
)
from lora_bench.sample_adapters import sample_adapters

DATA = Path(__file__).parent / "data" / "golden"
NAMES = {"a": "pirate", "b": "json", "c": "caps"}
MIXES: dict[str, Mix] = {
    "base": (),
    "a": (AdapterUse("pirate"),),
    "b": (AdapterUse("json"),),
    "c": (AdapterUse("caps"),),
    "a0": (AdapterUse("pirate", 0.0),),
    "a0.3": (AdapterUse("pirate", 0.3),),
    "a-0.5": (AdapterUse("pirate", -0.5),),
    "a1+c0.5": (AdapterUse("pirate", 1.0), AdapterUse("caps", 0.5)),
    "robot": (AdapterUse("robot"),),
    "robot1+a0.5": (AdapterUse("robot", 1.0), AdapterUse("pirate", 0.5)),
    "robot0.7+b0.8": (AdapterUse("robot", 0.7), AdapterUse("json", 0.8)),
}
NEAR_TIE = 0.005
ATOL = 1e-3
LLAMA_CPP = {"llamacpp-f32.json": ATOL, "llamacpp-q4_1.json": 0.75}
"""how far its log-probabilities are from ours; in the second it computes with activations of 8 bits"""


def read_golden(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text())


PROMPTS = read_golden("prompts.json")


class Bench:
    """An engine with the sample adapters, and everything that it said."""

    def __init__(self, base: Path, **load: Any) -> None:
        self.events: list[Event] = []
        self.engine = Engine(self.events.append)
        self.engine.load_model(LoadModel(str(base), **{"device": "cpu", "dtype": "fp32", "context": 512} | load))
        for name, path in sample_adapters():
            self.engine.load_adapter(str(path), name)

    def generate(self, requests: list[tuple[Any, Mix]], max_tokens: int = 48) -> list[list[int]]:
        """Greedy replies of requests that run side by side."""
        del self.events[:]
        for number, (prompt, mix) in enumerate(requests):
            self.engine.submit(Generate(number, prompt, mix, Sampling(max_tokens=max_tokens)))
        while self.engine.step():
            pass
        failed = [event for event in self.events if isinstance(event, RequestFailed)]
        assert not failed
        replies = {event.request_id: list(event.ids) for event in self.events if isinstance(event, RequestFinished)}
        return [replies[number] for number in range(len(requests))]


@pytest.fixture(scope="module")
def bench(sample_base: Path) -> Bench:
    return Bench(sample_base)


def _ids(prompt: str) -> TokenIds:
    return TokenIds(tuple(PROMPTS[prompt]["ids"]))


def _same_until_near_tie(got: list[int], expected: list[int], gaps: list[float]) -> bool:
    """Whether the replies are equal, or part at a step whose two best logits were nearly one."""
    differs = next((step for step, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    return got == expected if differs is None else gaps[differs] < NEAR_TIE


@pytest.fixture(scope="module")
def replies(bench: Bench) -> dict[tuple[str, str], list[int]]:
    """Greedy, to every prompt with every mix, side by side in one batch."""
    cases = [(case, prompt) for case in MIXES for prompt in PROMPTS]
    found = bench.generate([(_ids(prompt), MIXES[case]) for case, prompt in cases])
    assert any(event.requests > 8 and event.adapters == 3 for event in bench.events if isinstance(event, StepFinished))
    return dict(zip(cases, found, strict=True))


def test_greedy_replies_of_every_mix_equal_pefts(replies: dict[tuple[str, str], list[int]]) -> None:
    wrong = []
    for (case, prompt), reply in replies.items():
        expected = read_golden(f"peft-{case}.json")["results"][prompt]
        if not _same_until_near_tie(reply, expected["tokens"], expected["gaps"]):
            wrong.append((case, prompt, reply, expected["tokens"]))
    assert not wrong


def test_greedy_replies_equal_llama_cpps(replies: dict[tuple[str, str], list[int]]) -> None:
    """Of its run in fp32 all. Where it also quantises activations only what is far from a tie can be asked for: some replies part early."""
    exact, quantised = read_golden("llamacpp-f32.json"), read_golden("llamacpp-q4_1.json")
    same = {}
    for case, prompt in [(case, prompt) for case in exact for prompt in PROMPTS]:
        reply, gaps = replies[case, prompt], read_golden(f"peft-{case}.json")["results"][prompt]["gaps"]
        assert _same_until_near_tie(reply, exact[case]["results"][prompt]["tokens"], gaps), (case, prompt)
        same[case, prompt] = reply == quantised[case]["results"][prompt]["tokens"]
    assert len(same) == 48 and sum(same.values()) >= 24


@pytest.mark.parametrize("prompt", PROMPTS)
def test_first_log_probabilities_are_llama_cpps(bench: Bench, prompt: str) -> None:
    known: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    for name, apart in LLAMA_CPP.items():
        for case, expected in read_golden(name).items():
            assert {(NAMES[key[0]], scale) for key, scale in expected["adapters"]} == {(use.name, use.scale) for use in MIXES[case]}
            result = expected["results"][prompt]
            ids, values = zip(*result["first_top"], strict=True)
            before = tuple(result["tokens"][:result["tokens"].index(ids[0])])  # parts of a character: the server says none for them
            if (case, before) not in known:
                known[case, before] = bench.engine.logits([*PROMPTS[prompt]["ids"], *before], MIXES[case]).log_softmax(-1)
            got = known[case, before][list(ids)]
            torch.testing.assert_close(got, torch.tensor(values), atol=apart, rtol=0, msg=lambda m, c=case, n=name: f"{n} {c}: {m}")


@pytest.mark.parametrize("case", MIXES)
def test_top_logits_of_every_prompt(bench: Bench, case: str) -> None:
    for prompt, expected in read_golden(f"peft-{case}.json")["results"].items():
        logits = bench.engine.logits(PROMPTS[prompt]["ids"], MIXES[case])
        got = logits[expected["top_ids"]]
        torch.testing.assert_close(got, torch.tensor(expected["top_logits"]), atol=ATOL, rtol=0, msg=lambda m, p=prompt: f"{p}: {m}")
        assert abs(logits.logsumexp(0).item() - expected["logsumexp"]) < ATOL


@pytest.mark.parametrize("case", MIXES)
def test_all_logits_of_one_prompt(bench: Bench, case: str) -> None:
    with np.load(DATA / f"peft-{case}-full.npz") as archive:
        expected = torch.from_numpy(archive[archive.files[0]]).flatten()
    torch.testing.assert_close(bench.engine.logits(PROMPTS["P01"]["ids"], MIXES[case]), expected.float(), atol=ATOL, rtol=0)


def test_scale_zero_is_the_base_bit_for_bit(bench: Bench) -> None:
    off = tuple(AdapterUse(name, 0.0) for name in NAMES.values())
    for prompt in PROMPTS:
        computed = []
        for mix in (off, ()):
            bench.engine.clear_cache()
            computed.append(bench.engine.logits(PROMPTS[prompt]["ids"], mix))
        assert torch.equal(*computed)


def test_chats_are_tokenised_as_the_references_do(bench: Bench) -> None:
    chats = [Chat(tuple(Message(**message) for message in prompt["messages"])) for prompt in PROMPTS.values()]
    from_chats = bench.generate([(chat, ()) for chat in chats], max_tokens=4)
    started = [event.prompt_tokens for event in bench.events if isinstance(event, RequestStarted)]
    assert started == [len(prompt["ids"]) for prompt in PROMPTS.values()]
    assert from_chats == bench.generate([(_ids(prompt), ()) for prompt in PROMPTS], max_tokens=4)


def test_alora_acts_from_its_last_invocation_on(bench: Bench) -> None:
    cases = read_golden("alora.json")
    mix = (AdapterUse("certainty"),)
    for name, case in cases.items():
        got = bench.engine.logits(case["ids"], mix)[case["peft_top_ids"]]
        torch.testing.assert_close(got, torch.tensor(case["peft_top_logits"]), atol=ATOL, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    replies = bench.generate([(TokenIds(tuple(case["ids"])), mix) for case in cases.values()], max_tokens=8)
    assert replies == [case["peft_tokens"] for case in cases.values()]
    starts = [event.activations[0] for event in bench.events if isinstance(event, RequestStarted)]
    assert [start.start if start.found else None for start in starts] == [case["start"] for case in cases.values()]


def test_the_opening_of_a_chat_invokes_an_alora(bench: Bench) -> None:
    messages = (Message("user", "What is the capital of Norway?"), Message("assistant", "The capital of Norway is Oslo."))
    opening = "<|im_start|>certainty\n"
    expected = read_golden("alora.json")["once-high"]["peft_tokens"]
    assert bench.generate([(Chat(messages, opening), (AdapterUse("certainty"),))], 8) == [expected]


def test_mixes_in_one_batch_equal_each_alone(bench: Bench) -> None:
    both: Mix = (AdapterUse("pirate", 0.6), AdapterUse("json", 0.4))
    requests = [(_ids("P02"), mix) for mix in ((), (AdapterUse("pirate"),), (AdapterUse("caps", 0.7),), both)]
    alone = [bench.generate([request], max_tokens=12)[0] for request in requests]
    assert len({tuple(reply) for reply in alone}) == 4
    assert bench.generate(requests, max_tokens=12) == alone

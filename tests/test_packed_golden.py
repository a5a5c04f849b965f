"""The default base multiplied packed on a CPU against exact numbers: how far its logits and replies are from them, and llama.cpp's are."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_golden import ATOL, DATA, MIXES, NEAR_TIE, PROMPTS, Bench, read_golden

from lora_bench.engine.protocol import StepFinished, TokenIds
from lora_bench.kernels.packed_cpu import multiplies_packed

pytestmark = pytest.mark.skipif(not multiplies_packed(), reason="this CPU has no products of packed numbers")
LLAMA_CPP = read_golden("llamacpp-q4_1.json")
"""the same file there: activations have eight bits"""
MOST_DIVERGENCE = 1e-6
"""of the first token's distribution from the exact one, in nats"""
TOKENS = 16


@pytest.fixture(scope="module")
def bench(sample_base: Path) -> Bench:
    return Bench(sample_base, dtype="packed", slots=5)


def test_first_tokens_are_nearer_to_exact_ones_than_llama_cpps(bench: Bench) -> None:
    ours, theirs, best = [], [], []
    for case, there in LLAMA_CPP.items():
        for prompt, exact in read_golden(f"peft-{case}.json")["results"].items():
            wanted = dict(zip(exact["top_ids"], (value - exact["logsumexp"] for value in exact["top_logits"]), strict=True))
            got = bench.engine.logits(PROMPTS[prompt]["ids"], MIXES[case]).log_softmax(-1)
            both = [(token, value) for token, value in there["results"][prompt]["first_top"] if token in wanted]
            ours += [abs(float(got[token]) - wanted[token]) for token, _ in both]
            theirs += [abs(value - wanted[token]) for token, value in both]
            best.append(int(got.argmax()) == exact["top_ids"][0] or exact["gaps"][0] < NEAR_TIE)
    print(f"largest and mean: {max(ours):.3f} {np.mean(ours):.3f}; llama.cpp's {max(theirs):.3f} {np.mean(theirs):.3f}")
    assert len(ours) > 400 and max(ours) < 2 * ATOL < max(theirs) and np.mean(ours) < np.mean(theirs) and all(best)


@pytest.mark.parametrize("case", LLAMA_CPP)
def test_distributions_diverge_little(bench: Bench, case: str) -> None:
    with np.load(DATA / f"peft-{case}-full.npz") as archive:
        exact = torch.from_numpy(archive[archive.files[0]]).flatten().double().log_softmax(-1)
    got = bench.engine.logits(PROMPTS["P01"]["ids"], MIXES[case]).double().log_softmax(-1)
    assert float((exact.exp() * (exact - got)).sum()) < MOST_DIVERGENCE


def test_replies_of_all_mixes_side_by_side_follow_the_exact_ones(bench: Bench) -> None:
    cases = [(case, prompt) for case in LLAMA_CPP for prompt in PROMPTS][:32]
    replies = bench.generate([(TokenIds(tuple(PROMPTS[prompt]["ids"])), MIXES[case]) for case, prompt in cases], TOKENS)
    assert any(event.decode_tokens > 8 and event.adapters > 1 for event in bench.events if isinstance(event, StepFinished))
    equal = 0
    for (case, prompt), reply in zip(cases, replies, strict=True):
        exact = read_golden(f"peft-{case}.json")["results"][prompt]
        at = next((place for place, (one, other) in enumerate(zip(reply, exact["tokens"], strict=False)) if one != other), None)
        assert at is None or exact["gaps"][at] < NEAR_TIE, (case, prompt, at)
        equal += at is None
    print(f"{equal} of {len(cases)} replies equal the exact ones")
    assert equal >= 0.9 * len(cases)

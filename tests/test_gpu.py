"""The whole engine on a CUDA device against the same engine on the CPU."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_file import write_gguf

from lora_bench.engine.engine import Engine
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.models.names import gguf_name
from lora_bench.engine.protocol import (
    AdapterUse,
    CheckFinished,
    Event,
    Generate,
    LoadModel,
    Mix,
    RequestFinished,
    Sampling,
    SetMix,
    StepFinished,
    TokenIds,
)
from lora_bench.engine.service import Inbox, serve
from lora_bench.kernels.quant import QUANT_TYPES, dequantize

pytestmark = pytest.mark.gpu

Write = Callable[..., Path]
PROMPT = tuple(range(5, 45))
MIXES: tuple[Mix, ...] = (
    (), (AdapterUse("one"),), (AdapterUse("two", -0.5),), (AdapterUse("one", 0.3), AdapterUse("two", 0.7)), (AdapterUse("one", 0.0),),
)


@pytest.fixture
def folders(adapter_folder: Write) -> dict[str, Path]:
    return {"one": adapter_folder("one", ("q_proj", "down_proj"), r=2),
            "two": adapter_folder("two", ("v_proj", "gate_proj", "lm_head"), r=5)}


def _engine(base: Path, folders: dict[str, Path], device: str, dtype: str = "fp32") -> tuple[Engine, list[Event]]:
    events: list[Event] = []
    engine = Engine(events.append)
    engine.load_model(LoadModel(str(base), device=device, dtype=dtype))
    for name, folder in folders.items():
        engine.load_adapter(str(folder), name)
    return engine, events


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-4), ("bf16", 0.02), ("fp16", 0.003)])
def test_logits_of_every_mix_agree_with_the_cpu_in_fp32(
    tiny_gguf: Write, tiny_tensors: dict[str, torch.Tensor], tiny_facts: ModelFacts, folders: dict[str, Path], dtype: str, tolerance: float,
) -> None:
    # products of unit size: where attention is all but a choice of one token, a rounding changes the choice and nothing can be compared
    base = tiny_gguf(tensors={gguf_name(name, tiny_facts): (tensor / tensor.shape[1] ** 0.5).numpy()
                              for name, tensor in tiny_tensors.items() if tensor.dim() == 2})
    cpu, rounded, cuda = (_engine(base, folders, device, kind)[0] for device, kind in (("cpu", "fp32"), ("cpu", dtype), ("cuda", dtype)))
    for mix in MIXES:
        expected, of_dtype, got = (engine.logits(PROMPT, mix).cpu() for engine in (cpu, rounded, cuda))
        assert (got - expected).norm() <= tolerance * expected.norm() + 3 * (of_dtype - expected).norm(), mix


def test_a_batch_of_mixes_draws_what_the_cpu_draws(tiny_gguf: Write, folders: dict[str, Path]) -> None:
    base, replies = tiny_gguf(), []
    for device in ("cpu", "cuda"):
        engine, events = _engine(base, folders, device)
        for number, mix in enumerate(MIXES):
            sampling = Sampling(max_tokens=12, temperature=0.8 if number % 2 else 0.0, seed=number)
            engine.submit(Generate(number, TokenIds(PROMPT[: 10 + number]), mix, sampling))
        while engine.step():
            pass
        replies.append({event.request_id: event.ids for event in events if isinstance(event, RequestFinished)})
        steps = [event for event in events if isinstance(event, StepFinished)]
        assert steps and all(abs(sum(step.ms_by_op.values()) - step.ms) < 0.01 * step.ms + 0.01 for step in steps)
    assert replies[0] == replies[1] and len(replies[0]) == len(MIXES)


def test_the_loop_serves_a_live_change_on_the_device(tiny_gguf: Write, folders: dict[str, Path]) -> None:
    from threading import Thread

    from lora_bench.engine.protocol import LoadAdapter, MixSet, Shutdown

    events: list[Event] = []
    inbox = Inbox()
    inbox.put(LoadModel(str(tiny_gguf()), device="cuda", dtype="bf16"))
    for name, folder in folders.items():
        inbox.put(LoadAdapter(str(folder), name))
    inbox.put(Generate(1, TokenIds(PROMPT), (AdapterUse("one"),), Sampling(max_tokens=100)))
    inbox.put(SetMix((AdapterUse("two", 0.5),), (1,)))
    loop = Thread(target=serve, args=(inbox, events.append))
    loop.start()
    try:
        for _ in range(600):
            loop.join(0.1)
            if any(isinstance(event, RequestFinished) for event in events):
                break
    finally:
        inbox.put(Shutdown())
        loop.join(30)
    assert [event.mix for event in events if isinstance(event, MixSet)] == [(AdapterUse("two", 0.5),)]
    assert any(isinstance(event, RequestFinished) for event in events)


@pytest.mark.parametrize("kind", sorted(QUANT_TYPES))
def test_every_type_becomes_the_same_numbers_as_on_the_cpu(kind: str, seed: int) -> None:
    blocks = torch.randint(0, 256, (1000, QUANT_TYPES[kind].block_bytes), dtype=torch.uint8)  # scales of any bits: NaN, infinite, subnormal
    expected, got = dequantize(blocks.view(-1), kind), dequantize(blocks.cuda().view(-1), kind).cpu()
    number = ~expected.isnan()
    assert torch.equal(got.view(torch.int32)[number], expected.view(torch.int32)[number]) and torch.equal(got.isnan(), ~number)


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-4), ("bf16", 0.15)])
def test_packed_weights_compute_what_dense_ones_do_on_the_cpu(tmp_path: Path, dtype: str, tolerance: float, seed: int) -> None:
    base = write_gguf(tmp_path / "m.gguf", {"q_proj": "Q4_K", "v_proj": "Q6_K", "": "Q8_0"}, np.random.default_rng(seed))
    dense, packed = Engine(lambda event: None), Engine(lambda event: None)
    dense.load_model(LoadModel(str(base), device="cpu", weights="dense"))
    info = packed.load_model(LoadModel(str(base), device="cuda", dtype=dtype, weights="packed"))
    expected, got = dense.logits(PROMPT, ()), packed.logits(PROMPT, ()).cpu().float()
    assert info.weights == "packed" and (got - expected).norm() <= tolerance * expected.norm()


def test_a_check_finds_what_it_finds_on_the_cpu(tiny_gguf: Write, folders: dict[str, Path]) -> None:
    base, reports = tiny_gguf(), []
    for device in ("cpu", "cuda"):
        engine, events = _engine(base, folders, device)
        engine.checks.ask("two", True)
        while engine.checks.busy:
            engine.checks.advance()
        reports.append(next(event.report for event in events if isinstance(event, CheckFinished)))
    cpu, cuda = reports
    assert cuda.mean_kl == pytest.approx(cpu.mean_kl, rel=0.02) and abs(cuda.changed_share - cpu.changed_share) < 0.05
    for ours, theirs in zip(cuda.deltas, cpu.deltas, strict=True):
        assert ours.place == theirs.place and ours.share == pytest.approx(theirs.share, rel=1e-4)

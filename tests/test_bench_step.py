"""The measurement of steps: what it compares is the engine's own steps, and a plain decoder that computes the same."""
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from lora_bench.engine import random_base
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.bench_plain import PlainStep, plain_obstacle
from lora_bench.engine.bench_step import run_step
from lora_bench.engine.blocks import BLOCK_TOKENS, BlockTable
from lora_bench.engine.failures import OutOfMemory
from lora_bench.engine.measured_base import MeasuredBase
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts, tensor_shapes
from lora_bench.engine.protocol import STEP_OPS
from lora_bench.engine.random_base import (
    PACKED_TYPES,
    WrongShape,
    adapter_bytes,
    check_room,
    random_adapter,
    random_weights,
    shape_facts,
)
from lora_bench.workbench.cli import main
from lora_bench.workbench.measuring_options import Packed

SHAPE = "layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,intermediate=48,vocab=64"
CPU = torch.device("cpu")


def test_every_cell_is_told_whole() -> None:
    options = f"--shape {SHAPE} --device cpu --adapters 3 --ranks 4,8 --batch 1,3 --context 20 --prefill 24 --steps 6 --json"
    done = subprocess.run([sys.executable, "-m", "lora_bench.workbench.cli", "bench", "step", *options.split()], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["base"]["weights"] == "random" and result["adapters"]["ranks"] == [4, 8, 4] and result["copy_bytes_per_second"] > 0
    assert result["flags"]["batch"] == [1, 3] and result["machine"]["versions"]["torch"] == torch.__version__
    assert result["machine"]["device"] and result["machine"]["flags"]["threads"] >= 1
    cells = [(cell["batch"], cell["adapters"], cell["ranks"]) for cell in result["decode"]]
    assert cells == [(1, "base", []), (1, "1 adapter", [4]), (3, "base", []), (3, "1 adapter", [4]), (3, "3 adapters", [4, 8, 4])]
    assert [(cell["adapters"], cell["prompts"]) for cell in result["prefill"]] == [("base", 1), ("1 adapter", 1), ("3 adapters", 3),
                                                                                ("base", 3)]
    for cell in result["decode"] + result["prefill"]:
        assert 0 < cell["least_ms"] <= cell["ms"] <= cell["greatest_ms"] and set(cell["ms_by_op"]) == set(STEP_OPS)
        assert cell["times"] >= 3 and sum(cell["floor_ms"].values()) > 0 and cell["of_floor"] > 0 and cell["over_base"] > 0
        assert (cell["ms_by_op"]["shrink"] > 0) == (cell["adapters"] != "base") == (cell["floor_ms"]["adapters"] > 0)
    assert all(cell["plain_torch_ms"] > 0 and cell["plain_torch_over"] > 0 for cell in result["decode"])
    assert "decode, batch 3, 3 adapters: round 3 of 3\n" in done.stderr


def test_a_base_in_a_file_is_measured_too(base: Path) -> None:
    result = run_step(model=str(base), device="cpu", adapters=0, batch=(2,), context=10, prefill=(), steps=3)
    (cell,) = result["decode"]
    assert cell["adapters"] == "base" and result["prefill"] == [] and result["base"]["layers"] == 2 and result["why_no_plain_torch"] == ""
    with pytest.raises(ValueError, match="would grow to 307 tokens, its context is 256; take a shorter"):
        run_step(model=str(base), device="cpu", context=300, batch=(1,), prefill=(), steps=3)


def test_wrong_usage_is_one_sentence(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words, arguments in [
        ("'wide=3' is no size; give 8b, 1b, 135m, or sizes", ["--shape", "wide=3"]),
        ("--ranks 4,x: give whole numbers from 1 to 1,024", ["--ranks", "4,x"]), ("--batch 0", ["--batch", "0"]),
        ("the one or the other", [str(base), "--shape", "1b"]), ("less than 2 tokens each", ["--prefill", "8"]),
        ("no such file", ["none.gguf"]),
        ("types of a model stand in its file", [str(base), "--packed", "Q8_0"]),
    ]:
        assert main(["bench", "step", "--device", "cpu", *arguments]) == 2
        out, err = capfd.readouterr()
        assert out == "" and words in err and err.count("\n") <= 2 and "Traceback" not in err, err


def test_shapes_that_cannot_be_are_refused() -> None:
    for words, asked in [("cannot share 3 key/value", {"shape": "heads=4"}),
                         ("rows of embed_tokens.weight have 576 numbers, Q6_K packs 256 at a time", {"packed": "Q6_K"})]:
        with pytest.raises(WrongShape, match=words):
            run_step(device="cpu", **asked)


def test_a_shape_that_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_base, "free_memory", lambda: 30_000_000_000)
    with pytest.raises(OutOfMemory, match="32,121,044,992 bytes, 30,000,000,000 are free"):
        check_room(shape_facts("8b"), CPU, torch.float32)
    check_room(shape_facts("8b"), CPU, torch.bfloat16)
    check_room(shape_facts("8b"), CPU, torch.float32, "Q4_K")


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_packed_random_weights_have_the_size_of_dense_ones(kind: str, seed: int) -> None:
    facts = shape_facts("layers=1,hidden=256,heads=4,kv_heads=2,head_dim=64,intermediate=512,vocab=64")
    check_room(facts, CPU, torch.float32, kind)
    weights = random_weights(facts, CPU, torch.float32, kind)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == tensor_shapes(facts)
    for name, weight in weights.items():
        if weight.shape != (256,):
            numbers = torch.cat([chunk for _, chunk in weight.chunks(torch.float32, 1 << 20)])
            assert weight.parts[0].type == ("Q6_K" if kind in ("Q4_K", "Q5_K") and name == "embed_tokens.weight" else kind)
            assert 0.8 < numbers.square().mean().sqrt() * weight.shape[1] ** 0.5 < 1.2 and numbers.unique().numel() > 8


def test_packed_random_weights_are_measured() -> None:
    shape = "layers=1,hidden=64,heads=4,kv_heads=2,head_dim=16,intermediate=96,vocab=64"
    result = run_step(shape=shape, packed="Q4_1", device="cpu", adapters=1, batch=(2,), context=10, prefill=(), steps=3)
    assert result["base"]["weights"] == "random Q4_1" and "packed" in result["why_no_plain_torch"]
    assert [cell["adapters"] for cell in result["decode"]] == ["base", "1 adapter"]


def test_the_command_line_offers_every_packed_type() -> None:
    assert get_args(Packed) == PACKED_TYPES


def test_shapes_in_words() -> None:
    assert shape_facts("8b,layers=2").layers == 2 and shape_facts("8b, layers=2").hidden == 4096
    assert shape_facts("layers=3,heads=6").heads == 6 and shape_facts("1b").tied
    for text in ("", "8b,layers", "layers=-1", "layers=0", "8b,1b"):
        with pytest.raises(WrongShape):
            shape_facts(text)


def test_random_adapters_act_and_are_counted(seed: int) -> None:
    facts = shape_facts(SHAPE)
    adapter = random_adapter(facts, "one", 5, CPU, torch.float32).adapter
    assert adapter.weights.nbytes == adapter_bytes(facts, 5, 4) and len(adapter.modules) == 14
    base = MeasuredBase(Decoder(facts, random_weights(facts, CPU, torch.float32), 200), [5, 8], 3, 30)
    for names, count in ((base.names, 2), (base.names[:1], 1), ([], 0)):
        timed = base.decode(names, 3, 30, 4, 10.0)
        assert [(step.decode_tokens, step.adapters) for step in timed.steps] == [(3, count)] * 4 and len(timed.ms) == 4
    assert len(base.prefill(base.names, 40, 2, 10.0).ms) == 2
    steps = base.prompt_steps(base.names, 40)
    assert [(step.prefill_tokens, step.requests, step.adapters) for step in steps] == [(40, 2, 2)]
    assert [step.prefill_tokens for step in base.prompt_steps((), 150)] == [128, 22]


def test_the_plain_step_computes_what_the_decoder_does(tiny_facts: ModelFacts, seed: int) -> None:
    decoder = Decoder(tiny_facts, {name: 0.3 * torch.randn(shape) for name, shape in tensor_shapes(tiny_facts).items()}, 32)
    caches, table = decoder.kv_cache(1, BLOCK_TOKENS), BlockTable([0])
    ids = torch.randint(tiny_facts.vocab, (6,)).tolist()
    stored = torch.empty(0)
    for context in range(1, 7):
        plain = PlainStep(decoder, 2, context)
        if context > 1:
            plain.cache[..., :context - 1, :] = stored
        plain.ids.fill_(ids[context - 1])
        plain.run()
        stored = plain.cache
        ours = decoder.forward(step_inputs([Chunk((ids[context - 1],), context - 1, table, True)], CPU), caches, None, lambda op: None)
        torch.testing.assert_close(plain.logits, ours.expand(2, -1), atol=1e-4, rtol=1e-4)


def test_a_base_that_plain_torch_is_not_written_for_is_named(tiny_facts: ModelFacts) -> None:
    facts = replace(tiny_facts, qk_norm="head")
    decoder = Decoder(facts, {name: torch.randn(shape) for name, shape in tensor_shapes(facts).items()}, 32)
    assert "like llama" in plain_obstacle(decoder)

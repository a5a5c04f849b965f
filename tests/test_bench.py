"""The speed measurement measures what it says: our decode steps, and PEFT on the same weights."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lora_bench.engine.bench import main
from lora_bench.engine.bench_peft import PeftBench
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import STEP_OPS, AdapterUse, LoadModel

Write = Callable[..., Path]


@pytest.fixture
def base(tiny_gguf: Write, tiny_tensors: dict[str, torch.Tensor]) -> Path:
    """A tiny base that never says a special token, so that replies have their full length."""
    head = tiny_tensors["lm_head.weight"].clone()
    head[:5] = 0
    return tiny_gguf(tensors={"output.weight": head.numpy()})


def test_bench_prints_speeds_ratios_and_splits(base: Path, adapter_folder: Write, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(base), "--lora", str(adapter_folder("one")), "--tokens", "5", "--rounds", "2", "--against", "peft"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["tokens_per_second"]) == {"base", "1 adapter", "4 chats, 4 mixes", "base, PEFT", "1 adapter, PEFT"}
    assert all(speed > 0 for speed in result["tokens_per_second"].values()) and set(result["ratio"]) == {"base", "1 adapter"}
    assert all(set(split) == set(STEP_OPS) for split in result["step_ms"].values()) and result["step_ms"]["base"]["shrink"] == 0
    assert all(len(values) == 2 for values in result["every_round"].values())
    assert main(arguments[:-2]) == 0
    assert "tok/s" in capsys.readouterr().out


def test_bench_says_why_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf" in capsys.readouterr().err


def test_the_two_compared_compute_the_same(base: Path, adapter_folder: Write) -> None:
    engine = Engine(lambda event: None)
    engine.load_model(LoadModel(str(base), device="cpu"))
    info = engine.load_adapter(str(adapter_folder("one", ("q_proj", "up_proj", "down_proj"))))
    peft = PeftBench(engine.model, info.path)
    ids = [5, 9, 13, 30, 7]
    with torch.inference_mode():
        theirs = peft._peft(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(engine.logits(ids, (AdapterUse(info.name),)), theirs, atol=1e-4, rtol=1e-3)

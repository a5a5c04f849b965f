"""The speed measurement measures what it says: our decode steps, and PEFT on the same weights."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lora_bench.engine import bench
from lora_bench.engine.bench_peft import PeftBench
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import STEP_OPS, AdapterUse, LoadModel
from lora_bench.workbench.cli import main
from lora_bench.workbench.speed import _lines

Write = Callable[..., Path]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lora_bench.workbench.cli", "bench", *map(str, arguments)], capture_output=True, text=True,
                          timeout=120)


def test_bench_prints_speeds_ratios_and_splits(base: Path, adapter_folder: Write) -> None:
    arguments = [base, "--lora", adapter_folder("one"), "--tokens", 5, "--rounds", 2]
    done = run(*arguments, "--against", "peft", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["tokens_per_second"]) == {"base", "1 adapter", "4 chats, 4 mixes", "base, PEFT", "1 adapter, PEFT"}
    assert all(speed > 0 for speed in result["tokens_per_second"].values()) and set(result["ratio"]) == {"base", "1 adapter"}
    assert all(set(split) == set(STEP_OPS) for split in result["step_ms"].values()) and result["step_ms"]["base"]["shrink"] == 0
    assert all(len(values) == 2 for values in result["every_round"].values())
    assert "warming up: base, PEFT\n" in done.stderr and "round 2 of 2: 4 chats, 4 mixes\n" in done.stderr
    lines = "\n".join(_lines(bench.run_bench(str(base), [str(arguments[2])], tokens=5, rounds=1)))
    assert lines.count("tok/s") == 3 and "PEFT" not in lines


def test_bench_says_why_it_cannot(base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    for code, words, arguments in [
        (2, "no such file", [tmp_path / "none.gguf"]), (2, "no sample adapter", ["--lora", "pirat"]), (2, "from 2 to", ["--tokens", 0]),
        (3, "bad.gguf", [tmp_path / "bad.gguf"]), (3, "the base has layers.0 to layers.1", [base, "--lora", "pirate"]),
    ]:
        assert main(["bench", *map(str, arguments)]) == code
        out, err = capfd.readouterr()
        assert out == "" and re.search(f"^lora-bench: .*({words})", err, re.MULTILINE) and "Traceback" not in err


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "PEFT_PACKAGES", ("no_such_package",))
    monkeypatch.setattr(sys, "argv", ["bench", json.dumps({"model": None, "against": "peft"})])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # main sets it aside
    assert bench.main() == 2
    assert "-m pip install no_such_package" in capsys.readouterr().err


def test_the_two_compared_compute_the_same(base: Path, adapter_folder: Write) -> None:
    engine = Engine(lambda event: None)
    engine.load_model(LoadModel(str(base), device="cpu"))
    info = engine.load_adapter(str(adapter_folder("one", ("q_proj", "up_proj", "down_proj"))))
    peft = PeftBench(engine.model, info.path)
    ids = [5, 9, 13, 30, 7]
    with torch.inference_mode():
        theirs = peft._peft(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(engine.logits(ids, (AdapterUse(info.name),)), theirs, atol=1e-4, rtol=1e-3)

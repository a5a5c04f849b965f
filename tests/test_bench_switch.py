"""The measurement of changes of adapters: each way to the first token is the way that it is called by."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lora_bench.engine import random_files
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.base_file import open_base
from lora_bench.engine.bench_loop import CannotLoad
from lora_bench.engine.bench_switch import run_switch
from lora_bench.engine.models.facts import ModelFacts, tensor_shapes
from lora_bench.engine.random_base import WrongShape, random_adapter, shape_facts
from lora_bench.engine.random_files import write_adapter, write_base
from lora_bench.engine.weights.load import load_weights
from lora_bench.workbench.cli import main

NAMES = ["the base", "in its slot", "in the host tier", "on disk", "loaded unasked", "rescaled", "switched off", "switched on"]


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lora_bench.workbench.cli", "bench", "switch", *map(str, arguments)], capture_output=True,
                          text=True, timeout=120)


def test_every_change_is_measured_beside_a_reply(base: Path) -> None:
    done = _run(base, "--device", "cpu", "--rank", 3, "--times", 2, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [switch["adapter"] for switch in result["switches"]] == NAMES
    assert result["adapters"]["rank"] == 3 and result["base"]["device"] == "cpu" and result["machine"]["versions"]["torch"]
    for switch in result["switches"]:
        assert len(switch["every_time"]) == len(switch["beside_at_most_ms"]) == 2 and min(switch["every_time"]) > 0
        assert min(switch["every_time"]) <= switch["ms"] <= max(switch["every_time"]) and switch["beside_ms"] > 0
    between = result["between_steps"]
    assert between["replies"] == 8 and between["steps"] >= 5 and 0 < between["median_ms"] <= between["greatest_ms"]
    assert "warming up: on disk\n" in done.stderr and "2 of 2: switched on\n" in done.stderr


def test_random_weights_of_a_shape_are_a_base_in_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shape = "layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,intermediate=48,vocab=64"
    facts = shape_facts(shape)
    write_base(tmp_path / "base", facts, torch.device("cpu"))
    base = open_base(tmp_path / "base")
    weights = load_weights(base, "cpu", torch.float32)
    assert base.facts == facts and base.end_tokens == ()
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == tensor_shapes(facts)
    assert all(weight.std() > 0.01 for weight in weights.values())
    assert main(["bench", "switch", "--shape", shape, "--device", "cpu", "--rank", "2", "--times", "1"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith(shape) and [line[:18].strip() for line in out.splitlines()[2:-1]] == NAMES and "writing random weights" in err
    assert re.search(r"between two steps of 8 replies the engine's loop takes \d+\.\d{3} ms", out)


def test_there_must_be_room_for_a_random_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000_000_000))
    with pytest.raises(OSError, match="takes 16,060,522,496 bytes, 10,000,000,000 are free there; set TMPDIR"):
        write_base(tmp_path / "base", shape_facts("8b"), torch.device("cpu"))
    assert not (tmp_path / "base").exists()


def test_wrong_usage_and_bases_that_cannot_be_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    for code, words, arguments in [(2, "no such file", ["none.gguf"]), (2, "from 1 to 1,?024", ["--rank", "0"]),
                                   (2, "the one or the other", [str(tmp_path / "bad.gguf"), "--shape", "1b"]),
                                   (3, "bad.gguf", [str(tmp_path / "bad.gguf")])]:
        assert main(["bench", "switch", *arguments]) == code
        out, err = capfd.readouterr()
        assert out == "" and re.search(words, err) and "Traceback" not in err
    with pytest.raises(WrongShape, match="is no size"):
        run_switch(shape="wide=3", device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_what_the_engine_refuses_is_said(base: Path) -> None:
    with pytest.raises(CannotLoad, match="device cuda was asked for"):
        run_switch(str(base), device="cuda", times=1)


def test_a_random_adapter_in_a_folder_is_the_same(tiny_facts: ModelFacts, tmp_path: Path, seed: int) -> None:
    ours = random_adapter(tiny_facts, "one", 3, torch.device("cpu"), torch.bfloat16).adapter
    write_adapter(tmp_path / "one", ours)
    theirs = load_adapter(open_adapter(tmp_path / "one"), tiny_facts, "one")
    assert theirs.modules.keys() == ours.modules.keys() and theirs.info.ranks == (3,)
    for name, pair in ours.modules.items():
        other = theirs.modules[name]
        assert torch.equal(pair.a, other.a) and torch.equal(pair.b, other.b) and pair.scaling == other.scaling

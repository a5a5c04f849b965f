"""The measurement of later turns finds what the mixes allow, and the adapters that it hands to llama-server are ours."""
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.bench_server import write_adapter
from lora_bench.engine.bench_turns import run_turns
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.workbench.cli import main
from lora_bench.workbench.turns import _line

Write = Callable[..., Path]
PREFIX = 100


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lora_bench.workbench.cli", "bench", "turns", *map(str, arguments)], capture_output=True,
                          text=True, timeout=120)


def test_what_is_found_of_each_turn(base: Path, adapter_folder: Write) -> None:
    loras = ["--lora", adapter_folder("one"), "--lora", adapter_folder("two", ("v_proj",))]
    done = _run(base, *loras, "--prefix", PREFIX, "--rounds", 2, "--dtype", "bf16", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dtype"] == "bf16"
    conversations = json.loads(done.stdout)["conversations"]
    assert all(turn["hit_tokens"] == [0, 0] and len(turn["every_round"]) == 2 for by_who in conversations.values()
               for turn in by_who["no reuse"])
    found = {name: [min(turn["hit_tokens"]) for turn in by_who["reuse"]] for name, by_who in conversations.items()}
    asked = {name: [turn["prompt_tokens"][0] for turn in by_who["reuse"]] for name, by_who in conversations.items()}
    for name in ("base, base", "base, aLoRA, base", "LoRA, the same"):  # all of the first turn and of its reply but the last token drawn
        assert found[name][:2] == [0, asked[name][0] + 7]
    assert found["base, aLoRA, base"][2] == asked["base, aLoRA, base"][0] + 8 + 24, "all before the invocation"
    assert found["base, LoRA"] == [0, 0]
    assert found["there and back"][:2] == [0, 0] and all(hits >= PREFIX + 24 for hits in found["there and back"][2:])
    assert found["rescaled and back"][:2] == [0, 0] and found["rescaled and back"][2] >= PREFIX + 24
    why = {name: [turn["why"] for turn in by_who["reuse"]] for name, by_who in conversations.items()}
    assert why["base, LoRA"][1] == "mix differs: A acts now, not then; new tokens"
    assert why["rescaled and back"][1] == "mix differs: A x 1 then, x 0.5 now; new tokens"


def test_it_says_what_it_cannot(base: Path, adapter_folder: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (str(adapter_folder(name)) for name in ("one", "two"))
    for adapters, words in (((one,), "two adapters without an invocation"), ((one, two), "the context 256; give --prefix")):
        with pytest.raises(ValueError, match=words):
            run_turns(str(base), adapters)
    assert main(["bench", "turns", str(base), "--server", str(tmp_path / "none")]) == 2
    assert "there is no such program; give the path of a llama-server" in capsys.readouterr().err
    done = _run(base, "--lora", one, "--lora", two, "--prefix", PREFIX, "--server", "/bin/false")
    assert done.returncode == 3 and done.stdout == "" and "did not become ready" in done.stderr and "Traceback" not in done.stderr


def test_an_adapter_for_llama_server_is_the_one_that_is_loaded(tiny_facts: ModelFacts, adapter_folder: Write, tmp_path: Path) -> None:
    folder = adapter_folder("one", ("q_proj", "k_proj", "down_proj"), r=3, use_rslora=True, alora_invocation_tokens=[9, 10])
    ours = load_adapter(open_adapter(folder), tiny_facts, "one")
    path = write_adapter(ours, ours.info.invocation_tokens, tiny_facts, tmp_path / "one.gguf")
    theirs = load_adapter(open_adapter(path), tiny_facts, "one")
    assert theirs.info.invocation_tokens == (9, 10) and theirs.modules.keys() == ours.modules.keys()
    for name, pair in ours.modules.items():
        other = theirs.modules[name]
        torch.testing.assert_close(other.scaling * other.b @ other.a, pair.scaling * pair.b @ pair.a)


def test_what_llama_cpp_cannot_load_is_named(tiny_facts: ModelFacts, adapter_folder: Write, tmp_path: Path) -> None:
    folder = adapter_folder("one", ("q_proj",), modules_to_save=["norm"], tensors={
        **{f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{half}.weight": torch.randn(shape)
           for i in range(2) for half, shape in (("A", (2, 24)), ("B", (36, 2)))},
        "base_model.model.model.norm.weight": torch.randn(24)}, r=2)
    adapter = load_adapter(open_adapter(folder), tiny_facts, "one")
    with pytest.raises(ValueError, match="'one' is more than pairs of low-rank matrices .* leave out --server"):
        write_adapter(adapter, (), tiny_facts, tmp_path / "one.gguf")


def test_a_line_shows_time_tokens_and_the_reason() -> None:
    turn = {"every_round": [1.5, 2.25], "ttft_ms": 1.875, "hit_tokens": [16, 32], "prompt_tokens": [40, 41], "why": "x"}
    line = _line(1, [["A", 0.5]], "reuse", turn)
    assert line.split() == "turn 2, A x 0.5 reuse 1.9 ms (1.5 to 2.2) 16 to 32 of 41 tokens found x".split()
    assert "found" in _line(0, [], "no reuse", turn) and "x" not in _line(0, [], "no reuse", turn).split("found")[1]

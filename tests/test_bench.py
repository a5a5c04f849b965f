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
from lora_bench.engine.bench_speeds import Drawn, OwnSpeeds, speed_of
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import STEP_OPS, AdapterUse, LoadModel, RequestFinished
from lora_bench.workbench.cli import main
from lora_bench.workbench.speed import _lines

Write = Callable[..., Path]
FAKE_SERVER = '''
import http.server, json, pathlib, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, json.dumps({"build_info": "b0"}).encode())

    def do_POST(self):
        code = int(pathlib.Path(__file__).with_name("answer").read_text())
        times = {"predicted_n": 1, "predicted_ms": 1.0, "prompt_n": 1, "prompt_ms": 1.0}
        self.answer(code, json.dumps({"timings": times}).encode() if code == 200 else b"no lora here")

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lora_bench.workbench.cli", "bench", *map(str, arguments)], capture_output=True, text=True,
                          timeout=120)


def test_bench_prints_speeds_ratios_and_splits(base: Path, adapter_folder: Write) -> None:
    arguments = [base, "--lora", adapter_folder("one"), "--tokens", 5, "--rounds", 2, "--prompt", 40]
    done = run(*arguments, "--against", "peft", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result["tokens_per_second"]) == [
        "base", "base, PEFT", "1 adapter", "1 adapter, PEFT", "4 chats, base", "4 chats, 4 mixes", "prompt, 40 tokens"]
    assert all(speed > 0 for speed in result["tokens_per_second"].values()) and set(result["ratio"]) == {"base", "1 adapter"}
    assert all(set(split) == set(STEP_OPS) for split in result["step_ms"].values()) and result["step_ms"]["base"]["shrink"] == 0
    assert set(result["step_ms"]) == {"base", "1 adapter", "4 chats, base", "4 chats, 4 mixes"}
    assert all(len(values) == 2 for values in result["every_round"].values())
    assert result["dtype"] == "fp32" and result["peer"]["name"] == "PEFT" and "transformers " in result["peer"]["version"]
    said = done.stderr.splitlines()
    assert said.index("warming up: base, PEFT") + 1 == said.index("warming up: base")  # who begins changes
    assert said.index("round 1 of 2: base") + 1 == said.index("round 1 of 2: base, PEFT") and "round 2 of 2: 4 chats, 4 mixes" in said
    lines = _lines(result)
    assert max(map(len, lines)) <= 100 and sum("PEFT" in line for line in lines) == 2


def test_it_measures_what_was_asked_for(base: Path, adapter_folder: Write) -> None:
    result = bench.run_bench(str(base), tokens=3, rounds=1, rank=3, dtype="bf16", prompt_tokens=0)
    assert set(result["tokens_per_second"]) == {"base", "1 adapter", "4 chats, base", "4 chats, 4 mixes"}
    assert len(result["adapters"]) == 4 and result["rank"] == 3 and result["dtype"] == "bf16" and result["peer"] is None
    assert result["step_ms"]["1 adapter"]["shrink"] > 0 and result["chats_at_once"]["4 chats, base"] == [4]
    assert "4 random adapters of rank 3 on all linears" in _lines(result)
    names = [adapter_folder("first", alora_invocation_tokens=[9, 10]), adapter_folder("second")]
    result = bench.run_bench(str(base), list(map(str, names)), tokens=3, rounds=1, prompt_tokens=0)
    assert result["adapters"] == ["second", "first"] and result["step_ms"]["1 adapter"]["shrink"] > 0


def test_no_reply_ends_early(tiny_gguf: Write) -> None:
    def replies(end: int) -> list[tuple[int, ...]]:
        events: list[object] = []
        engine = Engine(events.append)
        engine.load_model(LoadModel(str(tiny_gguf(metadata={"tokenizer.ggml.eos_token_id": end})), device="cpu"))
        OwnSpeeds(engine, events).decode([([5, 9, 12], ()), ([6, 9], ())], 20)
        return [event.ids for event in events if isinstance(event, RequestFinished)]

    drawn = replies(2)
    assert replies(drawn[0][3]) == drawn and [len(ids) for ids in drawn] == [20, 20]


@pytest.mark.parametrize(("replies", "at_once", "speed"), [
    ([(0, 2, 40)], 1, 20), ([(0, 2, 40)] * 4, 4, 80), ([(0, 2, 40), (2.5, 4.5, 40), (5, 7, 40), (7, 9, 40)], 1, 20),
    ([(0, 2, 40), (1.99, 3.99, 40)], 1, 80 / 3.99), ([(0, 2, 40), (0.1, 2.1, 40), (0.1, 2.1, 40)], 3, 60),
    ([(0, 2, 40), (0, 2, 40), (3, 5, 40), (3, 5, 40)], 2, 40),
])
def test_the_speed_of_replies_beside_each_other_or_in_turns(replies: list[tuple[float, float, int]], at_once: int, speed: float) -> None:
    found = speed_of([Drawn(*reply) for reply in replies])
    assert found.at_once == at_once and found.tokens_per_second == pytest.approx(speed)


def test_bench_says_why_it_cannot(base: Path, adapter_folder: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    one = adapter_folder("one")
    for code, words, arguments in [
        (2, "no such file", [tmp_path / "none.gguf"]), (2, "no sample adapter", ["--lora", "pirat"]), (2, "from 2 to", ["--tokens", 0]),
        (2, "--lora and --rank were given", [base, "--lora", one, "--rank", 4]), (2, "--dtype", [base, "--dtype", "fp16"]),
        (2, "--server and --against were given", [base, "--server", sys.executable, "--against", "peft"]),
        (2, "there is no such program; give the path of a llama-server", [base, "--server", tmp_path / "none"]),
        (3, "bad.gguf", [tmp_path / "bad.gguf"]), (3, "the base has layers.0 to layers.1", [base, "--lora", "pirate"]),
        (3, "--prompt 940: a request would hold 941 tokens, the context 256; give at most 255", [base]),
        (3, "--tokens 300: a request would hold", [base, "--tokens", 300, "--prompt", 0]),
        (3, "did not become ready", [base, "--prompt", 0, "--server", "/bin/false"]),
    ]:
        assert main(["bench", *map(str, arguments)]) == code, arguments
        out, err = capfd.readouterr()
        assert out == "" and re.search(f"^lora-bench: .*({words})", err, re.MULTILINE) and "Traceback" not in err


def test_what_a_server_refuses_is_told(base: Path, tiny_folder: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{FAKE_SERVER}")
    program.chmod(0o700)
    for answer, words in ((400, "llama-server refused /completion: no lora here"), (200, "ended a reply after 1 of 4 tokens")):
        (tmp_path / "answer").write_text(str(answer))
        assert main(["bench", str(base), "--prompt", "0", "--tokens", "4", "--server", str(program)]) == 1
        out, err = capfd.readouterr()
        assert out == "" and words in err and "Traceback" not in err
    with pytest.raises(ValueError, match="reads GGUF files only"):
        bench.run_bench(str(tiny_folder()), prompt_tokens=0, server=str(program))


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

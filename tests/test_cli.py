"""The command line as a person's shell sees it: what goes where, and how it ends."""
from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripted_base import write_scripted_base

from lora_bench.engine import config, mix, request
from lora_bench.workbench import arguments, exit_codes, output
from lora_bench.workbench.arguments import (
    AdapterArgument,
    UsageError,
    escape,
    find_adapter,
    find_any,
    find_model,
    parse_adapter,
    parse_size,
    unescape,
)
from lora_bench.workbench.cli import main

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "lora_bench.workbench.cli"]


def run(*arguments: str, stdin: str | None = None, **options) -> subprocess.CompletedProcess[str]:
    feed = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, **feed, **options)


# -- words ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "expected"), [
    ("./pirate", ("./pirate", None, 1.0)),
    ("./pirate:0.75", ("./pirate", None, 0.75)),
    ("p=./pirate:-1", ("p", "./pirate", -1.0)),
    ("p=./pirate:1e-2", ("p", "./pirate", 0.01)),
    ("C:\\adapters\\pirate", ("C:\\adapters\\pirate", None, 1.0)),
    ("C:\\adapters\\pirate:.5", ("C:\\adapters\\pirate", None, 0.5)),
    ("./run=3/last", ("./run=3/last", None, 1.0)),
    ("a=b=c:2", ("a", "b=c", 2.0)),
    ("x:1:2", ("x:1", None, 2.0)),
    ("x:best", ("x:best", None, 1.0)),
    ("x:", ("x:", None, 1.0)),
])
def test_adapter_words(text: str, expected: tuple) -> None:
    first, second, scale = expected
    name, path = (first, second) if second else (None, first)
    assert parse_adapter(text) == AdapterArgument(path, name, scale)


@pytest.mark.parametrize("text", ["x:nan", "x:inf", "x:-Infinity", "x:1e999", "x:1e7", "=x", "n=", "", ":2"])
def test_adapter_words_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="--lora"):
        parse_adapter(text)


def test_a_sample_adapter_is_found_by_name_and_a_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_adapter(AdapterArgument("pirate", None, 0.5))
    assert (Path(found.path).parent.name, found.name, found.scale) == ("sample_adapters", "pirate", 0.5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pirate").mkdir()
    assert find_adapter(AdapterArgument("pirate", None, 0.5)).path == "pirate"
    with pytest.raises(UsageError, match="no such file or folder.*pirate"):
        find_adapter(AdapterArgument("parrot", None, 1.0))


def test_samples_are_found_where_a_model_or_an_adapter_may_stand() -> None:
    assert Path(find_any("json")).parent.name == "sample_adapters"
    with pytest.raises(UsageError, match="nope: no such file or folder.*pirate"):
        find_any("nope")
    with pytest.raises(UsageError, match="sample adapter, not a model.*--lora robot"):
        find_model("robot")


def test_limits_are_the_engines() -> None:
    ours = arguments.MAX_SCALE, arguments.MAX_SLOTS, arguments.MAX_STOPS, arguments.MAX_STOP_CHARACTERS
    assert ours == (mix.MAX_SCALE, config.MAX_SLOTS, request.MAX_STOPS, request.MAX_STOP_CHARACTERS)


@pytest.mark.parametrize(("typed", "meant"), [
    (r"a\nb", "a\nb"), (r"a\\nb", r"a\nb"), (r"\t\\", "\t\\"), (r"\x", r"\x"), ("end\\", "end\\"), ("a\nb", "a\nb"),
    ("<|im_start|>", "<|im_start|>")])
def test_escapes(typed: str, meant: str) -> None:
    assert unescape(typed) == meant and unescape(escape(meant)) == meant


@pytest.mark.parametrize(("text", "expected"), [
    ("0", 0), ("4096", 4096), ("4k", 4096), ("4K", 4096), ("512M", 512 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("1 tb", 1 << 40)])
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "k", "-1", "nan", "1e9", "4 apples", "9" * 40, "1kk"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


# -- what is printed, and how it ends --------------------------------------------------------------
def test_help_is_light_and_names_the_exit_codes() -> None:
    program = ("import sys\nfrom lora_bench.workbench.cli import main\ncode = main(['--help'])\n"
               "print(code, sorted({'torch', 'textual', 'numpy', 'lora_bench.workbench.app'} & sys.modules.keys()))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    flat = " ".join(done.stdout.split())
    assert "0 ok, 1 engine error, 2 wrong usage, 3 model or adapter" in flat
    for word in ("chat", "compare", "sweep", "inspect", "doctor", "bench", "--lora", "--host-cache"):
        assert word in flat


def test_the_readme_gives_the_same_exit_codes() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("OK", "ENGINE_ERROR", "USAGE", "INCOMPATIBLE", "OUT_OF_MEMORY", "INTERRUPTED"):
        assert f"| {getattr(exit_codes, name)} |" in readme


def test_without_a_terminal_the_workbench_names_chat() -> None:
    done = run()
    assert done.returncode == 2 and done.stdout == "" and "lora-bench chat" in done.stderr


@pytest.mark.parametrize("arguments", [
    ["--slot", "3"], ["--slots", "0"], ["chat", "--top-p", "1.5", "-p", "x"], ["chat", "--temp", "nan", "-p", "x"],
    ["chat", "nowhere.gguf", "-p", "x"],
    ["chat", "--lora", "pirate:nan", "-p", "x"], ["chat", "--lora", "a=pirate", "--lora", "a=json", "-p", "x"],
    ["chat", "--context", "many", "-p", "x"],
    ["inspect", "nowhere"], ["inspect"], ["chat", "--device", "tpu", "-p", "x"], ["chat", "-p", ""], ["chat", "-p", " \n"],
    ["chat", "--temp", "11", "-p", "x"], ["chat", "--lora", "pirate:1e9", "-p", "x"], ["bench", "--rounds", "0"], ["chatter"],
    ["chat", "--stop", "", "-p", "x"],
    ["chat", "--dtype", "packed", "--weights", "dense", "-p", "x"],
    ["check", "default", "pirate", "--dtype", "packed", "--weights", "dense"],
])
def test_wrong_usage_ends_with_2_and_prints_nothing(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("lora-bench: ") and "Traceback" not in err


@pytest.mark.parametrize("arguments, code", [
    (["inspect", "nowhere"], 2), (["inspect", ""], 2), (["inspect", "~nobody-of-that-name/x"], 2), (["plan", "pirate"], 2),
    (["check", "", "pirate"], 2),
    (["check", "default", ""], 2), (["inspect", "/dev/null"], 3), (["plan", "--frob"], 2),
])
def test_a_failure_with_json_is_one_document_too(arguments: list[str], code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == code
    out, err = capfd.readouterr()
    said = json.loads(out)
    assert said["exit_code"] == code and err == f"lora-bench: {said['error']}\n"


def test_inspect_shows_headers_and_refuses_what_is_no_model(tmp_path: Path, sample_base: Path) -> None:
    base = json.loads(run("inspect", str(sample_base), "--json").stdout)
    assert base["architecture"] == "llama" and base["layers"] == 30
    lines = run("inspect", str(ROOT / "sample_adapters" / "pirate")).stdout.splitlines()
    assert "kind: adapter" in lines and "rslora: no" in lines
    (tmp_path / "x.gguf").write_text("GGUF but not really")
    done = run("inspect", str(tmp_path / "x.gguf"))
    assert done.returncode == 3 and done.stdout == "" and "x.gguf" in done.stderr and "Traceback" not in done.stderr


def test_plan_says_what_fits_and_keeps_the_figures_for_scripts(sample_base: Path) -> None:
    lines = run("plan", str(sample_base)).stdout.splitlines()
    assert lines[0] == sample_base.stem and "30 layers" in lines[1] and lines[2].startswith("fp32: weights dense 513 MiB (packed 92.1 MiB)")
    assert lines[3].startswith("bf16: weights dense 257 MiB") and lines[4].startswith("packed: weights packed 92.1 MiB") and len(lines) == 5
    assert json.loads(run("plan", str(sample_base), "--json").stdout)["memory"]["fp32"]["packed_weights_bytes"]


def test_chat_prints_the_reply_alone(sample_base: Path) -> None:
    plain = run("chat", str(sample_base), "--max-tokens", "12", stdin="What is the capital of France?")
    assert plain.returncode == 0, plain.stderr
    assert "Paris" in plain.stdout and plain.stdout.endswith("\n")
    assert plain.stderr == "" or plain.stderr.startswith("lora-bench: the reply was cut")
    done = run("chat", str(sample_base), "--lora", "pirate:1", "--lora", "certainty", "-p", "What is the capital of France?",
               "--max-tokens", "12", "--json", "--stats")
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert reply["text"] and reply["text"] != plain.stdout.rstrip("\n")
    assert reply["stats"]["new_tokens"] == len(reply["ids"]) <= 12
    assert [use["name"] for use in reply["mix"]] == ["pirate", "certainty"]
    assert [a["found"] for a in reply["activations"] if a["adapter"] == "certainty"] == [False]
    assert "certainty: is off for this reply" in done.stderr
    assert r"--opening '<|im_start|>certainty\n'" in done.stderr and "tok/s" in done.stderr and "pirate: 120/120 modules" in done.stderr


def test_a_model_that_cannot_be_used_ends_with_3(tmp_path: Path, sample_base: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    done = run("chat", str(tmp_path / "bad.gguf"), "-p", "x")
    assert done.returncode == 3 and done.stdout == "" and "bad.gguf" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    done = run("chat", str(sample_base), "--lora", str(tmp_path / "adapter"), "-p", "x")
    assert done.returncode == 3 and done.stdout == "" and "adapter" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch needs more address space than the limit leaves")
def test_no_memory_ends_with_4(sample_base: Path) -> None:
    limit = 1100 << 20  # torch fits, the model does not
    done = run("chat", str(sample_base), "-p", "x", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert done.returncode == 4 and done.stdout == "" and "memory" in done.stderr and "Traceback" not in done.stderr


def test_interrupt_ends_with_130_and_takes_the_engine_along(sample_base: Path) -> None:
    process = subprocess.Popen([*COMMAND, "chat", str(sample_base), "-p", "Count from one to a thousand.", "--max-tokens", "2000"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout.read(1)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and b"Traceback" not in err and b"interrupted" in err
    assert children and not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_reader_that_goes_away_is_no_error(sample_base: Path) -> None:
    process = subprocess.Popen([*COMMAND, "chat", str(sample_base), "-p", "Count from one to fifty.", "--max-tokens", "60"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 0 and b"Traceback" not in err and b"Broken" not in err


def test_text_for_a_terminal_is_cleaned_and_for_a_pipe_is_not(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b]2;owned\x07b"
    output.write(evil)
    assert capfd.readouterr().out == evil
    program = f"from lora_bench.workbench import output; output.write({evil!r})"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    shown = b""
    while chunk := _read(terminal):
        shown += chunk
    os.waitpid(pid, 0)
    os.close(terminal)
    assert b"\x1b" not in shown and b"\x07" not in shown and shown.startswith(b"a") and shown.endswith(b"b")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other side is closed
        return b""


# -- check ----------------------------------------------------------------------------------------
def test_check_reports_for_people_and_for_scripts(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    base, good = str(tiny_gguf()), adapter_folder("good\x1b]2;owned\x07", bias="none")
    done = run("check", base, str(good), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    report = result["reports"][0]
    assert result["usable"] and report["info"]["matched"] == 4 and len(report["effect"]) == 5 and report["deltas"]
    bad = adapter_folder("bad", use_qalora=True)
    done = run("check", base, str(good), str(bad), "--no-effect")
    assert done.returncode == 3 and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("good␛]2;owned") and lines[0].endswith(": usable") and "bad: NOT usable" in lines
    assert lines[lines.index("bad: NOT usable") + 1].startswith("  ✗ ")
    assert "use_qalora" in done.stdout and "not run (--no-effect)" in done.stdout
    assert max(map(len, lines)) <= 80


def test_check_of_an_adapter_that_does_nothing_ends_with_3(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    done = run("check", str(tiny_gguf()), str(adapter_folder("zero", lora_alpha=0)))
    assert done.returncode == 3 and "zero: NOT usable" in done.stdout and "changes nothing" in done.stdout and done.stderr == ""


def test_check_without_a_model_or_an_adapter(tiny_gguf: Callable, tmp_path: Path) -> None:
    assert run("check", "nowhere.gguf", "pirate").returncode == 2
    assert run("check", str(tiny_gguf())).returncode == 2
    done = run("check", str(tiny_gguf()), "parrot")
    assert done.returncode == 2 and done.stderr.startswith("lora-bench: parrot: no such file")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    done = run("check", str(tmp_path / "bad.gguf"), "pirate")
    assert done.returncode == 3 and done.stdout == "" and "bad.gguf" in done.stderr


def test_a_reply_without_text_is_said(tmp_path: Path) -> None:
    done = run("chat", str(write_scripted_base(tmp_path, [])), "-p", "hello")
    assert (done.returncode, done.stdout) == (0, "\n")
    assert done.stderr == "lora-bench: the reply has no text: it ended after 1 token\n"

"""`compare` and `sweep` as a person's shell sees them, and the files that they leave."""
from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from thread_engine import ThreadEngine

from lora_bench.engine.protocol import Chat, Message, RawText, TokenIds
from lora_bench.workbench import engine_run, prompts_file
from lora_bench.workbench.arguments import UsageError
from lora_bench.workbench.backends import local
from lora_bench.workbench.charts import column_chart
from lora_bench.workbench.cli import main
from lora_bench.workbench.prompts_file import read_prompts
from lora_bench.workbench.reports import Places

COMMAND = [sys.executable, "-m", "lora_bench.workbench.cli"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `run`, in this process with the engine in a thread of it: torch is there already."""
    monkeypatch.setattr(engine_run, "LocalBackend", ThreadEngine)

    def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = main(list(arguments))
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run_here


def without_times(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in ("stats", "cache")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


# -- whole runs --------------------------------------------------------------------------------------
def test_a_suite_of_prompts_its_reports_and_the_command_that_repeats_them(
    tiny_gguf: Callable, adapter_folder: Callable, tmp_path: Path,
) -> None:
    base, one = str(tiny_gguf()), adapter_folder("one", alora_invocation_tokens=[3])
    two, evil = adapter_folder("two", r=2), adapter_folder("evil\x1b]2;owned\x07")
    prompts, lines, report = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", tmp_path / "report.md"
    prompts.write_text(f'"he the"\n\n{json.dumps({"prompt": "a" * 400})}\n{{"messages": [{{"role": "user", "content": "Abc"}}]}}\n')
    done = run("compare", base, "--a", f"{two}:0.75", "--a", f"x={one}:0.5", "--b", "base", "--c", str(evil), "-f", str(prompts),
               "--max-tokens", "9", "--temp", "0.9", "--seed", "5", "--md", str(report), "-o", str(lines))
    assert done.returncode == 1, done.stderr  # one of the prompts fits into no context; the others are answered
    assert "407 tokens" in done.stderr or "too long" in done.stderr
    assert done.stdout.count("A–B: ") == 3 and "prompt 3 of 3: Abc" in done.stdout and "all 3 prompts" in done.stdout
    first, failed, last = map(json.loads, lines.read_text().splitlines())
    assert all(column["failed"] for column in failed["columns"]) and failed["scored"] is None
    for data in (first, last):
        a, b, c = data["columns"]
        assert [use["name"] for use in a["mix"]] == ["two", "x"] and b["mix"] == [] and len(a["ids"]) <= 9
        assert [token["id"] for token in data["scored"]["tokens"]] == a["ids"]
        assert [row["mix"] for row in data["scored"]["rows"][:3]] == [a["mix"], b["mix"], c["mix"]]
        assert len(data["scored"]["rows"]) == 5  # A without each of its two; B is C without its one
        at = b["first_divergence"]["token"] if b["first_divergence"] else len(a["ids"])
        assert a["ids"][:at] == b["ids"][:at] and max(data["scored"]["rows"][1]["kl"]) == b["on_first_text"]["max_kl"]
        assert a["activations"][0]["found"] is True  # the tiny template has the token
    text = report.read_text()
    assert "\x1b" not in text and "\x1b" not in done.stdout and "evil␛]2;owned␇" in text and "seed 5" in text
    command = re.search(r"```sh\n(lora-bench .*)\n```", text)[1]
    assert "\x1b" not in command and "-f " in command


@pytest.mark.calm
def test_one_question_repeated_by_its_own_report_gives_the_same_tokens(
    tiny_gguf: Callable, adapter_folder: Callable, tmp_path: Path, run_here: Callable,
) -> None:
    report = tmp_path / "report.md"
    done = run_here("compare", str(tiny_gguf()), "--a", f"p={adapter_folder('pirate')}:0.75", "-p", "it's the", "-s", "he",
                    "--max-tokens", "12", "--json", "--md", str(report))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    said = json.loads(done.stdout)
    command = re.search(r"```sh\n(lora-bench .*)\n```", report.read_text())[1]
    assert said["command"] == command and "--b base" in command
    again = run_here(*shlex.split(command)[1:], "--json")
    assert again.returncode == 0, again.stderr
    assert without_times(json.loads(again.stdout)["rounds"]) == without_times(said["rounds"])


def test_a_sweep_begins_at_zero_and_takes_the_lines_of_a_report_as_prompts(
    tiny_gguf: Callable, adapter_folder: Callable, tmp_path: Path, run_here: Callable,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": {"messages": [{"role": "user", "content": "the he"}], "opening": ""}, "columns": []}\n')
    lines = tmp_path / "out.jsonl"
    done = run_here("sweep", str(tiny_gguf()), "--lora", f"p={adapter_folder('pirate')}", "--scales", "-0.5:1:0.5", "--with",
                    f"o={adapter_folder('other')}:0.25", "-f", str(prompts), "--max-tokens", "6", "-o", str(lines))
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines()[2:6]]
    assert [row[0] for row in table] == ["-0.50", "0.00", "0.50", "1.00"] and table[1][1:4] == ["0.000", "0.000", "100%"]
    data = json.loads(lines.read_text())
    assert [column["label"] for column in data["columns"]] == ["0.00", "-0.50", "0.50", "1.00"]
    assert data["columns"][0]["mix"] == [{"name": "o", "scale": 0.25}]
    means = [sum(row["kl"]) / len(row["kl"]) for row in data["scored"]["rows"]]
    assert means[0] == 0 and table[3][1] == f"{means[3]:.3f}" and done.stdout.count(" · length\n") + done.stdout.count(" · stop\n") == 4


def test_what_cannot_be_compared_ends_with_3(tiny_gguf: Callable, adapter_folder: Callable, run_here: Callable) -> None:
    done = run_here("compare", str(tiny_gguf()), "--a", str(adapter_folder("bad", use_qalora=True)), "-p", "x", "--json")
    assert done.returncode == 3 and "use_qalora" in done.stderr and json.loads(done.stdout)["exit_code"] == 3


INTERRUPTED = """
import os, signal, time
from lora_bench.engine import __main__, scores
told = []

def advance(self):
    time.sleep(0.01)
    if not told:
        told.append(os.kill(os.getppid(), signal.SIGINT))

scores.Scores.advance = advance
__main__.main()
"""


def test_ctrl_c_while_figures_are_computed_leaves_the_replies(
    tiny_talker: Callable, adapter_folder: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local, "_ENGINE", [sys.executable, "-P", "-c", INTERRUPTED])
    lines, report, prompts = tmp_path / "out.jsonl", tmp_path / "out.md", tmp_path / "prompts.jsonl"
    prompts.write_text('"he"\n"the"\n')
    assert main(["compare", str(tiny_talker()), "--a", str(adapter_folder("one")), "-f", str(prompts), "--max-tokens", "4",
                 "-o", str(lines), "--md", str(report)]) == 130
    out, err = capfd.readouterr()
    (data,) = map(json.loads, lines.read_text().splitlines())
    texts = [column["text"] for column in data["columns"]]
    assert data["scored"] is None and data["score_failed"] == "interrupted" and all(texts)
    assert "not scored: interrupted" in err and all(text.strip() in out and text.strip() in report.read_text() for text in texts)


# -- words -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("arguments", "why"), [
    (["compare", "-p", "x"], "give --a"), (["compare", "--a", "base", "--a", "pirate", "-p", "x"], "no adapter at all"),
    (["compare", "--a", "parrot", "-p", "x"], "--a parrot"), (["compare", "--a", "pirate:nan", "-p", "x"], "--a pirate:nan"),
    (["compare", "--a", "pirate", "--a", "pirate", "-p", "x"], "two adapters are called pirate"),
    (["compare", "--a", "x=pirate", "--b", "x=json", "-p", "x"], "in one column"),
    (["compare", "--a", "pirate", "-p", "x", "-f", "y"], "both -p and -f"), (["compare", "--a", "pirate", "-f", "nowhere"], "nowhere"),
    (["compare", "--a", "pirate", "-p", "x", "-o", "/nowhere/x"], "-o /nowhere/x"),
    (["compare", "--a", "pirate", "-p", "x", "--md", "/"], "--md /"),
    (["sweep", "--lora", "pirate", "-p", "x"], "scales"), (["sweep", "--scales", "0:1:0.5", "-p", "x"], "lora"),
    (["sweep", "--lora", "pirate:0.5", "--scales", "0:1:0.5", "-p", "x"], "the path alone"),
    (["sweep", "--lora", "pirate", "--scales", "0:1", "-p", "x"], "START:END:STEP"),
    (["sweep", "--lora", "pirate", "--scales", "0", "-p", "x"], "no scale but 0"),
    (["sweep", "--lora", "pirate", "--scales", "0:1:0.5", "--with", "pirate", "-p", "x"], "the adapter that is turned"),
    (["sweep", "--lora", "pirate", "--scales", "0:1:0.5", "-p", ""], "nothing to ask"),
    (["compare", "nowhere.gguf", "--a", "pirate", "-p", "x"], "nowhere.gguf"),
])
def test_wrong_usage_is_said_before_anything_is_loaded(arguments: list[str], why: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("lora-bench: ") and why in err and "Traceback" not in err


def test_a_report_is_not_written_over_the_prompts(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('"a"')
    with pytest.raises(UsageError, match="the file of the prompts itself"):
        Places(False, str(tmp_path / "x"), None).check(str(tmp_path / ".." / tmp_path.name / "x"))
    Places(False, str(tmp_path / "y"), str(tmp_path / "z")).check(str(tmp_path / "x"))


# -- prompts -------------------------------------------------------------------------------------------
def test_prompts_of_every_form(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('"one"\r\n\n{"prompt": "two", "more": 1}\n{"prompt": {"text": "<s>raw"}}\n{"ids": [1, 2]}\n'
                    '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u\\u2028v"}], "opening": "<x>"}\n')
    assert read_prompts(str(file), "sys", "<o>") == (
        Chat((Message("system", "sys"), Message("user", "one")), "<o>"), Chat((Message("system", "sys"), Message("user", "two")), "<o>"),
        RawText("<s>raw"), TokenIds((1, 2)), Chat((Message("system", "s"), Message("user", "u\u2028v")), "<x>"))
    assert read_prompts(str(file), None, "")[0] == Chat((Message("user", "one"),))


@pytest.mark.parametrize("line", [
    "plain words", '""', "3", "[]", "{}", '{"prompt": 3}', '{"prompt": ""}', '{"messages": []}', '{"messages": [3]}',
    '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "user", "content": 3}]}', '{"ids": ["a"]}', '{"ids": [1.5]}', "[" * 100_000,
    '{"messages": [{"role": "user", "content": "x"}], "opening": 3}'])
def test_lines_that_hold_no_prompt_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('"fine"\n' + line + "\n")
    with pytest.raises(UsageError, match="x.jsonl, line 2: .*a line is a JSON string"):
        read_prompts(str(file), None, "")


def test_files_that_hold_no_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.jsonl"
    monkeypatch.setattr(prompts_file, "MAX_PROMPTS", 4)
    monkeypatch.setattr(prompts_file, "MAX_BYTES", 98)
    for content, why in ((b"\n \n", "holds 0 prompts"), (b'"\xff"', "not text in UTF-8"), (b'"a"\n' * 5, "holds 5 prompts"),
                         (b"x" * 99, "larger")):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=why):
            read_prompts(str(file), None, "")
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(str(tmp_path), None, "")


# -- the chart -------------------------------------------------------------------------------------------
def test_columns_stand_over_their_labels_as_high_as_their_values() -> None:
    assert column_chart([0.0, 1.0, 2.0], ["0.00", "0.50", "10.00"], 2) == [
        "2 ┤              ████",
        "1 ┤        ████  ████",
        "0 ┼──────────────────",
        "     0.00  0.50 10.00"]
    assert column_chart([0.0], ["x"], 1) == ["0 ┤", "0 ┼──", "    x"]
    assert column_chart([1.0, 4.0], ["a", "b"], 1)[0] == "4 ┤ ▂ █"

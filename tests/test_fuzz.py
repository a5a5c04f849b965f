"""Every fuzz target for a moment with a fixed seed, and the harness against faults of every kind it is to find."""
from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fuzz import run
from fuzz.target import fault_of_message, target_names
from fuzz_faults import FAULTS

EXECUTIONS = 100


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a worker says of all targets, one after the other in one process."""
    command = run.worker_command(target_names(), tmp_path_factory.mktemp("fuzz"), seed=1, seconds=60, executions=EXECUTIONS)
    child = subprocess.run(command, env=run.worker_environment(), capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.mark.parametrize("target", target_names())
def test_no_input_is_a_fault(told: list[dict[str, Any]], target: str) -> None:
    own = [line for line in told if line["target"] == target]
    assert not [line for line in own if "finding" in line]
    assert own[-1]["counts"]["executions"] > 0 and own[-1]["counts"]["accepted"] > 0


def test_the_harness_finds_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by a process that is larger than what the faults take: its own memory must not count for the worker's."""
    monkeypatch.setattr(run, "HANG_SECONDS", 6.0)
    held = b"x" * (600 << 20)
    figures = run.fuzz("fuzz_faults.", seconds=300, seed=1, out=tmp_path, executions=3 * len(FAULTS))
    del held
    kinds = " | ".join(figures["findings"])
    for kind in ("KeyError (fuzz_faults.py:run)", "Wrong (fuzz_faults.py:run)", "message does not name the file",
                 "message has control characters",
                 "memory", "slow", "code of the input ran", "crash: SIGSEGV", "hang"):
        assert kind in kinds, kinds
    assert figures["ended"] == sum(finding["count"] for kind, finding in figures["findings"].items() if kind.startswith(("hang", "crash")))
    files = tmp_path / "fuzz_faults." / "findings"
    assert (files / figures["findings"]["KeyError (fuzz_faults.py:run)"]["file"]).read_bytes() == b"\x01"
    assert all((files / finding["file"]).is_file() for finding in figures["findings"].values())


def test_messages(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert fault_of_message(f"{path}: is no GGUF file; convert it", tmp_path, "x.gguf") == ""
    assert "name" in fault_of_message("is no GGUF file", tmp_path, "x.gguf")
    assert "control" in fault_of_message(f"{path}: two\nlines", tmp_path, "x.gguf")
    assert "characters" in fault_of_message(f"{path}: {'x' * 700}", tmp_path, "x.gguf")
    assert "sentences" in fault_of_message(f"{path}: One. Two. Three. Four.", tmp_path, "x.gguf")

"""`doctor` tells the truth about this machine, part by part."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from lora_bench.engine import doctor
from lora_bench.engine.memory import container_limit, free_memory, total_memory


def test_every_part_is_answered() -> None:
    report = doctor.examine()
    assert report["packages"]["torch"] == torch.__version__
    assert report["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert report["memory"]["total_gib"] == round(psutil.virtual_memory().total / 2**30, 2)
    assert 1 <= report["cpu"]["usable_here"] <= report["cpu"]["logical_cores"]
    assert Path(report["cpu_kernels"]["place"]).is_dir() and report["cpu_kernels"]["compiled"] in (True, False)
    assert report["sample_run"].startswith("ok on cpu")
    json.dumps(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_why_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "none")
    why = doctor.examine()["gpu"]["why_none"]
    assert "no NVIDIA driver" in why and "CPU" in why
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.1\n")
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    gpu = doctor.examine()["gpu"]
    assert gpu["driver"] == "NVIDIA UNIX x86_64 Kernel Module  590.1"
    assert "no NVIDIA driver" not in gpu["why_none"] and "CUDA_VISIBLE_DEVICES='-1' hides" in gpu["why_none"]
    if torch.version.cuda is None:
        assert "built without CUDA" in gpu["why_none"]


def test_the_command_prints_it_for_people_and_programs(tmp_path: Path) -> None:
    env = os.environ | {"LORA_BENCH_CACHE": str(tmp_path), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "lora_bench.workbench.cli", "doctor"]
    report = json.loads(subprocess.run([*command, "--json"], env=env, capture_output=True, text=True, check=True).stdout)
    assert report["default_model"]["cached"] is False and report["default_model"]["cache"] == str(tmp_path)
    assert report["terminal"]["colours"] == 256 and report["terminal"]["interactive"] is False
    assert {"settings", "log"} <= report["files"].keys()
    text = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert f"torch: {torch.__version__}" in text and "sample_run: ok" in text


def test_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    assert total_memory(nowhere) == psutil.virtual_memory().total and container_limit(nowhere) is None and free_memory(nowhere) > 1 << 20
    files = {
        "two": {"memory.max": "1000000\n", "memory.current": "400000\n", "memory.stat": "anon 300000\ninactive_file 90000\n"},
        "one": {"memory/memory.limit_in_bytes": "1000000\n", "memory/memory.usage_in_bytes": "400000\n",
                "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 90000\n"},
        "none": {"memory.max": "max\n", "memory.current": "400000\n"},
        "over": {"memory.max": "1000\n", "memory.current": "4000\n"},
    }
    for name, contents in files.items():
        for file, text in contents.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
    for name in ("two", "one"):
        assert (total_memory(tmp_path / name), free_memory(tmp_path / name)) == (1_000_000, 690_000)
    assert container_limit(tmp_path / "none") is None and free_memory(tmp_path / "none") > 1 << 20
    assert free_memory(tmp_path / "over") == 0

"""What is installed: one import package of ours, the entry point, the data."""
from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "engine", "workbench", "sample_adapters")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as pip builds it, from a copy, so that nothing is left in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def text_of(wheel: zipfile.ZipFile, ending: str) -> str:
    return wheel.read(next(name for name in wheel.namelist() if name.endswith(ending))).decode()


def test_one_top_level_package(wheel: zipfile.ZipFile) -> None:
    """Another project owns the import name `kernels`: ours must never be installed under it."""
    assert text_of(wheel, "top_level.txt").split() == ["lora_bench"]
    assert {name.split("/")[0] for name in wheel.namelist() if ".dist-info" not in name} == {"lora_bench"}


def test_every_module_and_all_data_are_in_it(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".tcss", ".safetensors", ".json") or path.name == "py.typed":
                assert f"lora_bench/{path.relative_to(ROOT)}" in names


def test_entry_point_and_licence(wheel: zipfile.ZipFile) -> None:
    assert "lora-bench = lora_bench.workbench.cli:main" in text_of(wheel, "entry_points.txt")
    assert "License-Expression: Apache-2.0" in text_of(wheel, "METADATA")


def test_the_two_commands_come_first_in_the_readme() -> None:
    commands = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands[:2] == ["run", "test"]


def _bare_checkout(folder: Path) -> Path:
    """What make needs in `folder`, and beside it a folder of tools without any Python."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("sh", "make"):
        (tools / tool).symlink_to(shutil.which(tool))
    return tools


def test_make_names_what_is_missing_when_there_is_no_python(tmp_path: Path) -> None:
    tools = _bare_checkout(tmp_path)
    done = subprocess.run(["make", "test"], cwd=tmp_path, env={"PATH": str(tools)}, capture_output=True, text=True)
    assert done.returncode != 0 and "needs Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_says_when_venv_is_missing(tmp_path: Path) -> None:
    tools = _bare_checkout(tmp_path)
    python = tools / "python3"
    python.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "run"], cwd=tmp_path, env={"PATH": str(tools)}, capture_output=True, text=True)
    assert done.returncode != 0 and "python3-venv" in done.stderr

"""Imports point downward only, and the screen's process never holds torch."""
from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("kernels", "engine", "workbench", "sample_adapters")
ALLOWED = {
    "kernels": {"kernels"},
    "engine": {"engine", "kernels", "sample_adapters"},
    "workbench": {"workbench", "engine.protocol", "sample_adapters"},
    "sample_adapters": {"sample_adapters", "engine.default_model"},
}
"""floor -> what of our own it may import; sample_adapters is data, and the scripts that train it want the default model"""
FILES = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


def own_imports(path: Path) -> set[str]:
    """Dotted names, from the top of our packages, of everything of ours that a file imports."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            stem = ".".join(part for part in base if part)
            found |= {f"{stem}.{alias.name}" if stem else alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lora_bench"):
            found |= {f"{node.module}.{alias.name}".removeprefix("lora_bench.") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("lora_bench.") for alias in node.names if alias.name.startswith("lora_bench")}
    return found


def outside_imports(path: Path) -> set[str]:
    """Top names of every absolute import, also those inside functions."""
    tree = ast.walk(ast.parse(path.read_text()))
    nodes = [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[0] for name in names + [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    floor = path.relative_to(ROOT).parts[0]
    allowed = ALLOWED[floor]
    wrong = {name for name in own_imports(path) if not any(name == up or name.startswith(f"{up}.") for up in allowed)}
    assert not wrong, f"{floor} may import {sorted(allowed)} of ours, not {sorted(wrong)}"
    if floor == "workbench":
        assert not outside_imports(path) & {"torch", "numpy", "transformers", "peft"}
    if path == ROOT / "sample_adapters" / "__init__.py":
        assert not own_imports(path)
    assert floor == "sample_adapters" or not outside_imports(path) & {"transformers", "peft"} or path.name.startswith("bench")


def test_the_check_sees_relative_imports(tmp_path: Path) -> None:
    assert "engine.protocol.LoadModel" in own_imports(ROOT / "workbench" / "settings.py")
    assert "engine.protocol.Event" in own_imports(ROOT / "workbench" / "launch.py")


@pytest.mark.parametrize("module", ["workbench.app", "workbench.cli", "workbench.launch", "workbench.one_shot", "workbench.screens.load",
                                    "engine.protocol", "engine.default_model", "engine.plan", "engine.base_file", "engine.inspect"])
def test_no_torch_comes_in(module: str) -> None:
    program = f"import sys, lora_bench.{module}; print(sorted({{'torch', 'transformers', 'peft'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_files_stay_small() -> None:
    long = {str(path.relative_to(ROOT)): count for path in FILES if (count := len(path.read_text().splitlines())) > 400}
    assert not long

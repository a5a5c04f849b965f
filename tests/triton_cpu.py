"""Triton kernels on the CPU: its interpreter is chosen when Triton is imported, so the tests of kernels run in a process of their own.

A test file of kernels is named test_triton_*.py and holds plain tests under `pytestmark = interpreted`; its one test that runs in the
suite calls `run_interpreted(__file__)`, which fails when one of them fails where the interpreter is on. Several such files share a
process, which begins before the first test and takes what the others leave of the machine (conftest.py).
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

WITHIN = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not WITHIN, reason="runs under run_interpreted")
NAMES = "test_interpreted", "test_in_the_interpreter"
"""of the tests that call run_interpreted"""


class _Run:
    """The tests of `files` in a process where Triton interprets its kernels."""

    def __init__(self, files: Sequence[str], nice: int = 0) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._said = (self._folder / "said").open("w+b")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20", "-o", "junit_family=xunit1",
                   f"--junitxml={self._folder / 'report'}", *files]
        self._child = subprocess.Popen(command, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, stdout=self._said,
                                       stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=partial(os.nice, nice))

    @cached_property
    def failed(self) -> dict[str, bool]:
        """By name of the file, of those in which something ran: whether something failed."""
        self._child.wait()
        found: dict[str, bool] = {}
        if (report := self._folder / "report").exists():
            for case in ElementTree.parse(report).iter("testcase"):
                outcomes = {part.tag for part in case}
                if "skipped" not in outcomes:
                    name = Path(case.get("file", "")).name
                    found[name] = found.get(name, False) or bool(outcomes & {"failure", "error"})
        return found

    @cached_property
    def said(self) -> str:
        self._child.wait()
        return (self._folder / "said").read_text(errors="replace")[-8000:]

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        self._said.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_runs: dict[str, _Run] = {}
"""by file"""


def begin(items: Sequence[pytest.Item]) -> None:
    """Begin the process for the files whose tests are among `items`, where there are several."""
    files = sorted({str(item.path) for item in items if item.path.name.startswith("test_triton_") and item.name in NAMES})
    if len(files) > 1 and not WITHIN and find_spec("triton") is not None:
        _runs.update(dict.fromkeys(files, _Run(files, nice=19)))


def end() -> None:
    """What still runs is not waited for."""
    for run in set(_runs.values()):
        run.end()
    _runs.clear()


def run_interpreted(file: str) -> None:
    """Fail, with what was said, unless the tests of `file` that are marked `interpreted` ran and passed."""
    pytest.importorskip("triton")
    if WITHIN:
        pytest.skip("this is that process")
    if file not in _runs:
        _runs[file] = _Run([file])
    run = _runs[file]
    assert run.failed.get(Path(file).name) is False, run.said

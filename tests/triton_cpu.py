"""Triton kernels on the CPU: its interpreter is chosen when Triton is imported, so the tests of kernels run in a process of their own.

A test file of kernels is named test_triton_*.py and holds plain tests under `pytestmark = interpreted`; its one test that runs in the
suite calls `run_interpreted(__file__)`, which runs the file again where the interpreter is on.
"""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs under run_interpreted")


def run_interpreted(file: str) -> None:
    """Run the tests of `file` that are marked `interpreted` in a process where Triton interprets its kernels; fail with their output."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this is that process")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout

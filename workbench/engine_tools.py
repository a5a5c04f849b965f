"""Runs the engine's own small programs (inspect, plan, doctor, bench) as child processes and prints what they say.

The workbench's process never holds torch; these programs answer with one JSON object on standard output,
a sentence on standard error, and an exit code.
"""
from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from . import exit_codes, output
from .exit_codes import Failed


def ask(tool: str, *arguments: str) -> Any:
    """The JSON that `python -m lora_bench.engine.TOOL ARGUMENTS` prints. Raises Failed with what it said on standard error."""
    done = subprocess.run(_command(tool, arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise _failed(tool, done.returncode, done.stderr)
    return json.loads(done.stdout)


def follow(tool: str, argument: str, progress: Callable[[str], None]) -> Any:
    """The same for a program that takes its time: it prints a line {"progress": text} now and then, its answer is the last line."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        with subprocess.Popen(_command(tool, (argument,)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said,
                              text=True) as child:
            answer: Any = None
            for line in child.stdout:
                answer = json.loads(line)
                if text := answer.get("progress"):
                    progress(text)
        if child.returncode:
            said.seek(0)
            raise _failed(tool, child.returncode, said.read())
    return answer


def measure(tool: str, request: dict[str, Any], as_json: bool, lines_of: Callable[[Any], list[str]]) -> int:
    """`follow` with `request`, its progress in lines on standard error; then print as `show`. Returns the exit code. Raises Failed."""
    progress = output.ProgressLine(lines=True)
    try:
        result = follow(tool, json.dumps(request), progress.show)
    finally:
        progress.clear()
    output.write((json.dumps(result, indent=2) if as_json else "\n".join(lines_of(result))) + "\n")
    return exit_codes.OK


def _failed(tool: str, code: int, said: str) -> Failed:
    return Failed(said.strip() or f"{tool} ended with exit code {code} and said nothing", code if code > 0 else exit_codes.ENGINE_ERROR)


def show(
    tool: str, *arguments: str, as_json: bool, more: dict[str, Any] | None = None, lines_of: Callable[[Any], list[str]] = output.as_lines,
) -> int:
    """Print a tool's answer, and `more` after it, as JSON or as lines for people; returns the exit code. Raises Failed as `ask`."""
    answer = ask(tool, *arguments) | (more or {})
    lines = [json.dumps(answer, indent=2, ensure_ascii=False)] if as_json else lines_of(answer)
    output.write("\n".join(lines) + "\n")
    return exit_codes.OK


def _command(tool: str, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-P", "-m", f"lora_bench.engine.{tool}", *arguments]

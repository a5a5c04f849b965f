"""`lora-bench bench`: the engine measures itself in a child process; here its progress and figures are shown."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import engine_tools
from .text import counted


def report(model: str | None, adapters: Sequence[str], tokens: int, rounds: int, against: str | None, as_json: bool) -> int:
    """Measure and print; returns the exit code. Raises Failed."""
    request = {"model": model, "adapters": adapters, "tokens": tokens, "rounds": rounds, "against": against}
    return engine_tools.measure("bench", request, as_json, _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    """The range of the rounds stands beside their median: on a busy machine they lie far apart, and no ratio means much."""
    threads = counted(result["threads"], "thread")
    lines = [f"{result['model']} · {result['dtype']}, weights {result['weights']} · {threads} · {result['tokens']} tokens · median of "
             f"{result['rounds']}"]
    for name, speed in result["tokens_per_second"].items():
        rounds = result["every_round"][name]
        beside = f"   {result['ratio'][name]:.2f} x PEFT" if name in result["ratio"] else ""
        lines.append(f"{name:22}{speed:8.1f} tok/s  ({min(rounds):.1f} to {max(rounds):.1f}){beside}")
    for name, split in result["step_ms"].items():
        lines.append(f"{name:22}{sum(split.values()):8.1f} ms a step of the last round: "
                     + ", ".join(f"{op} {ms:.1f}" for op, ms in split.items()))
    return lines

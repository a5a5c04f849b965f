"""`lora-bench bench`: the engine measures itself in a child process; here its progress and figures are shown."""
from __future__ import annotations

from typing import Any

from . import engine_tools
from .text import clean_line, counted, listed, number_format


def report(request: dict[str, Any], as_json: bool) -> int:
    """Measure and print; returns the exit code. Raises Failed."""
    return engine_tools.measure("bench", request, as_json, _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    """Two tables in 100 columns. The range of the rounds stands beside their median: on a busy machine they lie far apart, and no ratio
    means much."""
    lines = [f"{clean_line(result['model'], 50)} · {number_format(result['dtype'], result['weights'])} · "
             f"{counted(result['threads'], 'thread')}"]
    if result["adapters"]:
        lines.append(f"4 random adapters of rank {result['rank']} on all linears" if result["rank"] else
                     f"{counted(len(result['adapters']), 'adapter')}: {listed([clean_line(name, 16) for name in result['adapters']], 4)}")
    lines += [f"tokens/s, replies of {result['tokens']} tokens, median of {result['rounds']} (least to most)", ""]
    return [*lines, *_speeds(result), *_peer(result), *_steps(result["step_ms"])]


def _speeds(result: dict[str, Any]) -> list[str]:
    peer, told = result["peer"], result["tokens_per_second"]
    lines = [f"{'':22}{'lora-bench':27}{peer['name']:27}ratio"] if peer else []
    for name in (label for label in told if peer is None or not label.endswith(f", {peer['name']}")):
        line = f"{name:22}{_cell(result, name):27}"
        if name in result["ratio"]:
            theirs = f"{name}, {peer['name']}"
            line += f"{_cell(result, theirs):27}{result['ratio'][name]:5.2f}"
        lines.append(line.rstrip())
    return lines


def _cell(result: dict[str, Any], label: str) -> str:
    rounds = result["every_round"][label]
    return f"{result['tokens_per_second'][label]:8.1f}  ({min(rounds):.1f} to {max(rounds):.1f})"


def _peer(result: dict[str, Any]) -> list[str]:
    """Who was compared, and what of the chats it did not decode beside each other."""
    if not (peer := result["peer"]):
        return []
    lines = ["", f"{peer['name']} {clean_line(peer['version'], 80)}"]
    for name in result["ratio"]:
        ours, theirs = (min(result["chats_at_once"][label]) for label in (name, f"{name}, {peer['name']}"))
        if theirs < ours:
            lines.append(f"{name}: {peer['name']} decoded {theirs} of them at a time")
    return lines


def _steps(splits: dict[str, dict[str, float]]) -> list[str]:
    ops = list(dict.fromkeys(op for split in splits.values() for op in split))
    lines = ["", f"{'ms of a step, by op':22}{'sum':>8}" + "".join(f"{op:>{len(op) + 2}}" for op in ops)]
    for name, split in splits.items():
        lines.append(f"{name:22}{sum(split.values()):8.1f}" + "".join(f"{split.get(op, 0.0):{len(op) + 2}.1f}" for op in ops))
    return lines

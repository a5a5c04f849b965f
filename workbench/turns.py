"""`lora-bench bench turns`: the engine measures turns that share a long beginning in a child process; here the figures are shown."""
from __future__ import annotations

from typing import Any

from . import engine_tools
from .text import clean_line, counted, number_format


def report(request: dict[str, Any], as_json: bool) -> int:
    """Measure and print; returns the exit code. Raises Failed."""
    return engine_tools.measure("bench_turns", request, as_json, _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    """A block of lines for each conversation; under a turn's median stands why not more of it was found."""
    lines = [f"{clean_line(result['model'])} · {number_format(result['dtype'], result['weights'])} · "
             f"{counted(result['threads'], 'thread')} · {result['prefix_tokens']} shared tokens · "
             f"time to the first token, median of {result['rounds']} (least to most)"]
    lines += [f"  {name} is {clean_line(path)}" for name, path in result["adapters"].items()]
    if "server" in result:
        lines.append(f"  llama-server {clean_line(result['server'])}, on the weights as they are in the file; its time is the one it tells")
    for name, by_who in result["conversations"].items():
        lines += ["", name]
        for turn, mix in enumerate(turn["mix"] for turn in next(iter(by_who.values()))):
            lines += [_line(turn, mix, who, turns[turn]) for who, turns in by_who.items()]
    return lines


def _line(number: int, mix: list[list[Any]], who: str, turn: dict[str, Any]) -> str:
    label = f"  turn {number + 1}, {' + '.join(f'{name} x {scale:g}' for name, scale in mix) or 'base'}"
    rounds, hits = turn["every_round"], turn["hit_tokens"]
    found = f"{min(hits)}" if min(hits) == max(hits) else f"{min(hits)} to {max(hits)}"
    why = f"  {clean_line(turn['why'])}" if turn["why"] and who == "reuse" else ""
    return (f"{label:26}{who:14}{turn['ttft_ms']:9.1f} ms  ({min(rounds):.1f} to {max(rounds):.1f})  "
            f"{found} of {turn['prompt_tokens'][-1]} tokens found{why}")

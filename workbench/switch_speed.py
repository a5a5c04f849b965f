"""`lora-bench bench switch`: the engine measures changes of adapters in a child process; here its progress and figures are shown."""
from __future__ import annotations

from typing import Any

from . import engine_tools
from .text import clean_line


def report(request: dict[str, Any], as_json: bool) -> int:
    """Measure and print; returns the exit code. Raises Failed."""
    return engine_tools.measure("bench_switch", request, as_json, _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    base, adapters = result["base"], result["adapters"]
    lines = [f"{clean_line(base['name'])} · {base['dtype']}, weights {base['weights']} · {clean_line(result['machine']['device'])} · "
             f"adapters of rank {adapters['rank']} on {adapters['linears']} · prompts of {result['prompt_tokens']} tokens",
             "milliseconds to the first token, median of "
             f"{result['flags']['times']} (least to greatest) · between two tokens of a reply beside it before, and at most meanwhile"]
    for switch in result["switches"]:
        every, most = switch["every_time"], switch["beside_at_most_ms"]
        lines.append(f"{switch['adapter']:18}{switch['ms']:10.2f} ms  ({min(every):.2f} to {max(every):.2f})   beside it "
                     f"{switch['beside_ms']:.2f}, then {switch['beside_ms'] + switch['stall_ms']:.2f} (up to {max(most):.2f})")
    between = result["between_steps"]
    if between["median_ms"] is not None:
        lines.append(f"between two steps of {between['replies']} replies the engine's loop takes {between['median_ms']:.3f} ms (up to "
                     f"{between['greatest_ms']:.3f}), median of {between['steps']}")
    return lines

"""`lora-bench bench step`: the engine measures its steps in a child process; here its progress and figures are shown."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import engine_tools
from .text import clean_line, counted


def report(request: dict[str, Any], as_json: bool) -> int:
    """Measure and print; returns the exit code. Raises Failed."""
    return engine_tools.measure("bench_step", request, as_json, _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    machine, base, adapters = result["machine"], result["base"], result["adapters"]
    lines = [
        f"{clean_line(base['name'])} · {base['dtype']}, weights {base['weights']}, {base['weight_bytes']:,} bytes · "
        f"{clean_line(machine['device'])} · torch {machine['versions']['torch']}",
        f"{counted(adapters['count'], 'adapter')} of rank {_numbers(adapters['ranks'])} on {adapters['linears']} · memory is copied at "
        f"{result['copy_bytes_per_second'] / 1e9:,.0f} GB/s, from which the floors follow · medians (least to greatest)"]
    if result["why_no_plain_torch"]:
        lines.append(f"no plain torch beside it: {clean_line(result['why_no_plain_torch'])}")
    for title, cells in (("decode", result["decode"]), ("prefill", result["prefill"])):
        lines += ["", *(line for cell in cells for line in _cell(title, cell))]
    return lines


def _cell(title: str, cell: dict[str, Any]) -> list[str]:
    size = f"batch {cell['batch']}" if title == "decode" else (
        f"{cell['tokens']} tokens" + (f" in {cell['prompts']}" if cell["prompts"] > 1 else ""))
    beside = [f"{cell['of_floor']:.0%} of the floor {sum(cell['floor_ms'].values()):.3f}" if title == "decode"
              else f"{cell['tokens_per_second']:,.0f} tokens/s"]
    if cell["ranks"]:
        beside.append(f"{cell['over_base']:.2f} x base")
    if cell.get("plain_torch_over") is not None:
        beside.append(f"plain torch {cell['plain_torch_ms']:.3f}, {cell['plain_torch_over']:.2f} x")
    if cell["path"]:
        beside.append(cell["path"])
    return [f"{title} {size:17}{cell['adapters']:12}{cell['ms']:10.3f} ms  ({cell['least_ms']:.3f} to {cell['greatest_ms']:.3f})  "
            + " · ".join(beside),
            "    " + ", ".join(f"{op} {ms:.3f}" for op, ms in cell["ms_by_op"].items() if ms)]


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(values)))

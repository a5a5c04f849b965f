"""`lora-bench bench kernels`: the engine measures its ops in a child process; here its progress and figures are shown."""
from __future__ import annotations

from typing import Any

from . import engine_tools
from .text import clean_line


def report(request: dict[str, Any], as_json: bool) -> int:
    """Measure and print; returns the exit code. Raises Failed."""
    return engine_tools.measure("bench_kernels", request, as_json, _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    flags, machine = result["flags"], result["machine"]
    lines = [f"{clean_line(result['shape'])} · {result['dtype']} · {clean_line(machine['device'])} · torch {machine['versions']['torch']}, "
             f"triton {machine['versions']['triton']}",
             f"{flags['rows']} rows of {flags['context']} tokens, prompts of {flags['tokens']} · memory is copied at "
             f"{result['copy_bytes_per_second'] / 1e9:,.0f} GB/s, from which the floors follow · microseconds, medians (least to greatest)"]
    if not result["triton"]:
        lines.append("no Triton here: ops of replies and tokens are their references, the engine takes other ones")
    for peer in result["peers"]:
        name = clean_line(f"{peer['peer']} {peer['version']}".strip(), 60)
        lacking = f"; not measured: {clean_line(peer['why'], 300)}" if peer["why"] else ""
        lines.append(f"{name}: torch's product and its LoRA ops on it{lacking}")
    for op in result["ops"]:
        beside = f" · torch {op['torch_us']:.1f}, {op['torch_over']:.2f} x" if op["torch_us"] is not None else ""
        beside += "".join(f" · {clean_line(peer)} {us:.1f}, {us / op['us']:.2f} x" for peer, us in op["peers_us"].items() if us is not None)
        lines.append(f"{op['op']:38}{op['us']:10.1f}  ({op['least_us']:.1f} to {op['greatest_us']:.1f})  {op['of_floor']:.0%} of the floor "
                     f"{op['floor_us']:.1f}{beside}")
    return lines

"""The load screen's list, its options and what they will need in memory. Plain Python, no widgets."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.cells import set_cell_size

from ..engine.protocol import LoadModel, ModelFailed
from .arguments import MAX_SLOTS, UsageError, check_formats, parse_size
from .model_scan import Found
from .settings import Recent
from .text import clean_line, counted, size_text

DEFAULT_NAME = "SmolLM2-135M-Instruct"


def why_not_loaded(event: ModelFailed) -> str:
    """The sentence for a load that ended without a model."""
    return "the load was cancelled; Enter starts it again" if event.cancelled else event.message


@dataclass(frozen=True)
class Choice:
    """One line of the list. `path` "" is the default model."""

    path: str
    name: str
    place: str
    detail: str

    def line(self, width: int) -> str:
        name_width = max(16, min(width - 36, 40))
        name = set_cell_size(clean_line(self.name, name_width), name_width)
        line = f"{name} {clean_line(self.place, 12):12} {clean_line(self.detail, 20):20}"
        room, path = width - name_width - 36, clean_line(self.path, 4096)
        return f"{line} {path if len(path) <= room else '…' + path[len(path) - room + 1:]}" if room > 12 else line


def choices(recent: tuple[Recent, ...], found: list[Found], words: str) -> list[Choice]:
    """The default model, then what was opened last, then what was found; only lines that have all `words`."""
    listed = [Choice("", DEFAULT_NAME, "built in", "the default model")]
    listed += [Choice(item.path, item.name, "recent", f"{item.used:%Y-%m-%d %H:%M}") for item in recent if item.path]
    opened = {item.path for item in recent}
    listed += [Choice(str(item.path), item.name, item.place, size_text(item.bytes)) for item in found if str(item.path) not in opened]
    wanted = words.lower().split()
    return [choice for choice in listed if all(word in f"{choice.name} {choice.place} {choice.path}".lower() for word in wanted)]


def load_command(path: str | None, options: dict[str, str]) -> LoadModel:
    """The command for these options as typed. Raises UsageError that names the option."""
    context, cache = _size("context", options["context"]), _size("host cache", options["host_cache"])
    slots = options["slots"].strip()
    if not slots.isdecimal() or not 1 <= int(slots) <= MAX_SLOTS:
        raise UsageError(f"slots: {slots!r} is not a number from 1 to {MAX_SLOTS}")
    check_formats(options["dtype"], options["weights"])
    return LoadModel(path, options["device"], options["dtype"], context, int(slots), cache, options["weights"])


def size_input(count: int) -> str:
    """A size as a person would type it: `1G`, `512M`, else the plain number."""
    for letter, unit in (("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10)):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """`memory_line` for a terminal: what the model is, then the need by number format, with the options nobody set."""
    if "memory" not in plan:
        return [memory_line(plan, {})]
    usual = {"context": "0", "host_cache": "1G", "slots": "4", "device": "cpu", "weights": "auto"}
    formats = ("fp32", "bf16", *(("packed",) if plan["cpu_dtype"] == "packed" else ()))
    said = {dtype: memory_line(plan, usual | {"dtype": dtype}).splitlines() for dtype in formats}
    return [plan["name"], said["fp32"][0], *(f"{dtype}: {lines[1]}" for dtype, lines in said.items())]


def memory_line(plan: dict[str, Any], options: dict[str, str]) -> str:
    """What the model is and what it will need, or which option cannot be meant."""
    if "memory" not in plan:
        return f"{plan['name']} will be downloaded once: {size_text(plan['download_bytes'])}; afterwards it works offline"
    try:
        load = load_command(None, options)
    except UsageError as error:
        return str(error)
    on_cpu = load.device != "cuda"
    unasked = ("fp32" if load.weights == "dense" else plan["cpu_dtype"]) if on_cpu else "bf16"
    dtype = unasked if load.dtype == "auto" or not on_cpu and load.dtype == "packed" else load.dtype
    if dtype == "packed" and plan["memory"]["packed"]["packed_weights_bytes"] >= plan["memory"]["fp32"]["dense_weights_bytes"]:
        dtype = "fp32"
    memory, free = plan["memory"][dtype], plan["available_bytes"]
    tokens = load.context or min(plan["trained_context"], 8192)
    dense, packed = memory["dense_weights_bytes"], memory["packed_weights_bytes"]
    too_tight = on_cpu and dense > plan["dense_share"] * free
    keep_packed = packed < dense and ("packed" in (load.weights, load.dtype) or load.weights == "auto" and too_tight)
    weights, kv = packed if keep_packed else dense, memory["kv_of_a_token_bytes"] * tokens
    if dtype == "packed":
        both = f"packed {size_text(packed)}"
    elif keep_packed:
        both = f"packed {size_text(packed)} (dense {size_text(dense)})"
    else:
        both = f"dense {size_text(dense)}" + (f" (packed {size_text(packed)})" if packed < dense else "")
    types = " ".join(f"{kind}×{count}" for kind, count in sorted(plan["weight_types"].items(), key=lambda item: -item[1])[:3])
    need = weights + kv
    fits = "fits" if need < free else "DOES NOT FIT"
    where = "of GPU memory" if load.device == "cuda" else f"of {size_text(free)} free: {fits}"
    return (f"{plan['architecture']} · {counted(plan['layers'], 'layer')} · {types} · {size_text(plan['file_bytes'])} on disk\n"
            f"weights {both} + a full chat of {tokens} tokens {size_text(kv)} = {size_text(need)} {where}; "
            f"adapters up to {size_text(load.host_cache_bytes)} more")

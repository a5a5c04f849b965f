"""The first line of the screen, and what stands in an empty chat."""
from __future__ import annotations

from pathlib import Path

from rich.cells import cell_len
from textual.content import Content

from ..sample_adapters import sample_adapters
from .charts import gauge
from .state import BenchState
from .text import clean_line, size_text

PHASES = {"download": "The default model is fetched, this once; afterwards it works offline", "header": "Reading the model's header",
          "tokenizer": "Reading the tokenizer", "weights": "Reading the weights", "warm-up": "Warming up"}
SAMPLE_EFFECTS = {"pirate": "talks like a pirate", "json": "answers in JSON", "caps": "SHOUTS", "robot": "goes BEEP BOOP",
                  "certainty": "(aLoRA) says how sure the answer was: v asks it"}

def header_line(state: BenchState, width: int) -> Content:
    """Model, number format, device, context in use, engine state; on a narrow screen the least of it is dropped."""
    model = state.model
    doing = "compares" if state.comparing else f"checks {clean_line(state.checking, 24)}" if state.checking else ""
    where = f"  engine {(state.engine == 'idle' and doing) or state.engine}{_progress(state)}"
    parts = {"title": (" lora-bench", "bold $accent")}
    if model:
        threads = f"({model.threads})" if model.device == "cpu" else ""
        parts["name"] = (f"  {clean_line(model.name, 40)}", "")
        packed = f"packed {size_text(model.weight_bytes)}" if model.weights == "packed" else ""
        number = "" if packed and model.dtype == "packed" else clean_line(model.dtype, 8)
        parts["facts"] = (f" · {', '.join(filter(None, (packed, number)))} · {clean_line(model.device, 12)}{threads}", "")
        parts["context"] = (f"  ctx {context_used(state)}/{model.context}", "")
    parts["engine"] = (where, "$text-error" if state.engine == "gone" else "bold")
    for least in ("title", "facts", "context"):
        if sum(cell_len(text) for text, _ in parts.values()) > width:
            parts.pop(least, None)
    return Content.assemble(*parts.values())


def _progress(state: BenchState) -> str:
    loading = state.loading
    if state.engine != "loading" or loading is None:
        return ""
    return f": {clean_line(loading.phase, 20)}" + (f" {loading.done / loading.total:.0%}" if loading.total > 0 else "")


def context_used(state: BenchState) -> int:
    """Tokens of the chat's latest reply and its prompt."""
    version = next((v for v in reversed(state.versions()) if v.prompt_tokens and not v.invoked), None)
    return version.prompt_tokens + version.tokens if version else 0


def welcome(state: BenchState) -> Content:
    """What to do, or how far a load is."""
    if state.engine == "gone":
        return Content("The engine is gone. Ctrl+E starts it again.")
    if state.engine == "starting":
        return Content("The engine is starting …")
    if state.engine == "loading":
        return loading_text(state)
    if not state.model:
        return Content("No model yet: Ctrl+O opens one.")
    name = clean_line(state.model.name, 60)
    return Content.assemble(
        (f"{name} is ready.", "bold"),
        "\n\n1  Type a question and press Enter: the base answers."
        "\n2  Tab goes to the adapters: ↑ ↓ choose one, Space switches it on, ← → change its scale. Esc comes back."
        "\n3  Ctrl+R asks the same again, under the mix that is set now.",
        _samples(state),
        f"\n\n/resume goes on with your last chat: {state.last_chat}" if state.last_chat else "",
        "\n\nF1 explains the keys, Ctrl+P finds every action.")


def _samples(state: BenchState) -> str:
    """What each sample adapter that is there does to a reply."""
    shipped = {name: path for name, path in sample_adapters() if name in SAMPLE_EFFECTS}
    there = [name for name, info in state.adapters.items() if name in shipped and Path(info.path) == shipped[name]]
    return "\n\n" + " · ".join(f"{name} {SAMPLE_EFFECTS[name]}" for name in there) if there else ""


def loading_text(state: BenchState) -> Content:
    """Phase, what is being read, and how much of it."""
    loading = state.loading
    if loading is None:
        return Content("The engine is starting; then the model is loaded. You may type already: the message waits for it. Esc cancels.")
    what = PHASES.get(loading.phase, clean_line(loading.phase, 20))
    lines = [what]
    if loading.total > 0:
        share = min(max(loading.done / loading.total, 0.0), 1.0)
        lines += [f"{gauge(share, 24)} {share:4.0%}", f"{size_text(loading.done)} of {size_text(loading.total)}"]
    lines += [clean_line(loading.item, 120), ""]
    return Content("\n".join(lines) + "\nYou may type already: the message waits for the model. Esc cancels.")

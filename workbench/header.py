"""The first line of the screen, and what stands in an empty chat."""
from __future__ import annotations

from textual.content import Content

from .charts import gauge
from .state import BenchState
from .text import clean_line, size_text


def header_line(state: BenchState, width: int) -> Content:
    """Model, number format, device, context in use, engine state; on a narrow screen the least of it is dropped."""
    model = state.model
    where = f"  engine {state.engine}{_progress(state)}"
    parts = {"title": (" lora-bench", "bold $accent")}
    if model:
        threads = f"({model.threads})" if model.device == "cpu" else ""
        parts["name"] = (f"  {clean_line(model.name, 40)}", "")
        parts["facts"] = (f" · {clean_line(model.dtype, 8)} · {clean_line(model.device, 12)}{threads}", "")
        parts["context"] = (f"  ctx {context_used(state)}/{model.context}", "")
    parts["engine"] = (where, "$text-error" if state.engine == "gone" else "bold")
    for least in ("title", "facts", "context"):
        if sum(len(text) for text, _ in parts.values()) > width:
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
    if state.loading:
        return loading_text(state)
    if not state.model:
        return Content("No model yet: Ctrl+O opens one.")
    name = clean_line(state.model.name, 60)
    return Content.assemble(
        (f"{name} is ready.", "bold"),
        "\nType a question and press Enter. Then F2, Space on an adapter, and Ctrl+R: the same question under another mix."
        "\nF1 explains the keys, Ctrl+P finds every action.")


def loading_text(state: BenchState) -> Content:
    """Phase, what is being read, and how much of it."""
    loading = state.loading
    if loading is None:
        return Content("")
    done = size_text(loading.done)
    if loading.total > 0:
        share = loading.done / loading.total
        amount = f"{gauge(share, 24)} {share:.0%}  {done} of {size_text(loading.total)}"
    else:
        amount = done if loading.done else ""
    return Content(f"Loading: {clean_line(loading.phase, 20)} {clean_line(loading.item, 60)}\n{amount}\n"
                   "Esc cancels. You may type already: the message waits for the model.")

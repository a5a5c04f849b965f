"""The first line of the screen, and what stands in an empty chat."""
from __future__ import annotations

from textual.content import Content

from .charts import gauge
from .state import BenchState
from .text import clean_line, size_text


def header_line(state: BenchState, width: int) -> Content:
    """Model, number format, device, context in use, engine state; what does not fit is dropped from the right."""
    model = state.model
    parts: list[tuple[str, str]] = [(" lora-bench", "bold $accent")]
    if model:
        threads = f"({model.threads})" if model.device == "cpu" else ""
        parts.append((f"  {clean_line(model.name, 40)} · {clean_line(model.dtype, 8)} · {clean_line(model.device, 12)}{threads}", ""))
        parts.append((f"  ctx {context_used(state)}/{model.context}", ""))
    parts.append((f"  engine {state.engine}{_progress(state)}", "$text-error" if state.engine == "gone" else "bold"))
    kept, used = [], 0
    for text, style in parts:
        if used + len(text) <= width:
            kept.append((text, style))
            used += len(text)
    return Content.assemble(*kept)


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

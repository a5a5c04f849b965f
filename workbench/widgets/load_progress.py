"""How far a model's load is, in two lines of text."""
from __future__ import annotations

from ...engine.protocol import ModelLoading
from ..charts import gauge
from ..text import clean_line, size_text


def progress_text(event: ModelLoading, width: int) -> str:
    """`weights ▰▰▰▱▱ 64 %  62.9 MiB of 98.4 MiB` and what is being read; without a bar while the total is unknown."""
    item = clean_line(event.item, max(width, 8))
    if event.total <= 0:
        return f"{clean_line(event.phase, 20)}\n{item}"
    share = min(max(event.done / event.total, 0.0), 1.0)
    bar = gauge(share, min(40, max(8, width - 40)))
    return f"{clean_line(event.phase, 20)} {bar} {share:4.0%}  {size_text(event.done)} of {size_text(event.total)}\n{item}"

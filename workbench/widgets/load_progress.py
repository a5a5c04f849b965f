"""How far a load is, in two lines of text."""
from __future__ import annotations

from pathlib import PurePath

from ...engine.protocol import AdapterLoading, ModelLoading
from ..charts import gauge
from ..text import clean_line, size_text


def reading_text(event: AdapterLoading, width: int) -> str:
    """`pirate ▰▰▱▱ 41 %` and `0.8 of 2.0 GiB · Esc stops it`."""
    name = clean_line(event.name or PurePath(event.path).name or event.path, max(width - 15, 8))
    share = min(max(event.done / event.total, 0.0), 1.0) if event.total > 0 else 0.0
    bar = gauge(share, min(20, max(4, width - len(name) - 7)))
    return f"{name} {bar} {share:4.0%}\n{size_text(event.done)} of {size_text(event.total)} · Esc stops it"


def progress_text(event: ModelLoading, width: int) -> str:
    """`weights ▰▰▰▱▱ 64 %  62.9 MiB of 98.4 MiB` and what is being read; without a bar while the total is unknown."""
    item = clean_line(event.item, max(width, 8))
    if event.total <= 0:
        return f"{clean_line(event.phase, 20)}\n{item}"
    share = min(max(event.done / event.total, 0.0), 1.0)
    bar = gauge(share, min(40, max(8, width - 40)))
    return f"{clean_line(event.phase, 20)} {bar} {share:4.0%}  {size_text(event.done)} of {size_text(event.total)}\n{item}"

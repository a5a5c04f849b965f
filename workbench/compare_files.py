"""A run written to files of the current folder: Markdown for people, JSON lines for programs."""
from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path

from .compare_state import Run
from .comparison_command import compare_command, sweep_command
from .comparison_export import jsonl_line, markdown
from .sweep_text import sweep_lines


def write_run(run: Run, folder: Path, now: datetime) -> tuple[Path, Path]:
    """Write both files under a name that is free. Raises OSError; nothing that was there is written over."""
    kind = "sweep" if run.swept else "compare"
    stem = f"{kind}-{now:%Y%m%d-%H%M%S}"
    title = f"Sweep of {run.swept}" if run.swept else "Comparison"
    command = (sweep_command if run.swept else compare_command)(run.setup, [run.prompt])
    summary = sweep_lines(run.setup, [run.round]) if run.swept else ()
    texts = markdown(run.setup, [run.round], title, command, summary), jsonl_line(run.setup, run.round)
    names = (stem + (f"-{number}" if number else "") for number in count())
    name = next(name for name in names if not any((folder / f"{name}{end}").exists() for end in (".md", ".jsonl")))
    files = folder / f"{name}.md", folder / f"{name}.jsonl"
    for file, text in zip(files, texts, strict=True):
        with file.open("x", encoding="utf-8", errors="replace") as handle:
            handle.write(text)
    return files


def export(run: Run | None, now: datetime) -> str:
    """Write a run to files of the current folder; their names, or why there are none."""
    if run is None or run.active or run.scoring:
        return "there is nothing to write yet" if run is None else "wait until all replies and figures are there"
    try:
        files = write_run(run, Path.cwd(), now)
    except OSError as error:
        return f"nothing was written: {error.filename or 'the current folder'}: {error.strerror or error}"
    return f"written: {files[0].name} and {files[1].name}, in {files[0].parent}"

"""Where a comparison on the command line goes: standard output, a file of JSON lines, a Markdown report."""
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import exit_codes, output
from .arguments import UsageError
from .comparison import Round, Setup
from .comparison_export import jsonl_line, markdown
from .exit_codes import Failed


@dataclass(frozen=True)
class Places:
    """Files that are written over."""

    json: bool
    lines: str | None
    markdown: str | None

    def check(self, source: str | None) -> None:
        """Raises UsageError for files that cannot be, or that are the prompts themselves."""
        for option, path in (("-o", self.lines), ("--md", self.markdown)):
            if path is None:
                continue
            file = Path(path).expanduser()
            if not path.strip() or file.is_dir() or not file.parent.is_dir():
                raise UsageError(f"{option} {path or repr(path)}: no file can be written there; name one in a folder that exists")
            if source is not None and file.exists() and file.samefile(Path(source).expanduser()):
                raise UsageError(f"{option} {path}: is the file of the prompts itself; name another")


@dataclass
class Reports:
    """What is asked for of `setup`, as the rounds come: what was answered before an interruption stays."""

    setup: Setup
    places: Places
    title: str
    command: str
    text: Callable[[Round, int], str]
    """(round, its number from 1) -> what a person reads of it"""
    summary: Callable[[Sequence[Round]], list[str]]
    """lines over all rounds; none where there is nothing to add"""
    rounds: list[Round] = field(default_factory=list)

    def add(self, round: Round) -> None:
        """Raises Failed when a file cannot be written."""
        self.rounds.append(round)
        line = jsonl_line(self.setup, round)
        if self.places.lines is not None:
            self._write(self.places.lines, line, more=len(self.rounds) > 1)
        if self.places.markdown is not None:
            summary = self.summary(self.rounds)
            self._write(self.places.markdown, markdown(self.setup, self.rounds, self.title, self.command, summary), more=False)
        if not self.places.json:
            output.write(self.text(round, len(self.rounds)))

    def close(self) -> int:
        """The rest of what standard output is to hold; returns the exit code: ENGINE_ERROR where a reply or its figures are missing."""
        if self.places.json:
            rounds = [json.loads(jsonl_line(self.setup, round)) for round in self.rounds]
            output.write(json.dumps({"command": self.command, "rounds": rounds}, ensure_ascii=False) + "\n")
        elif len(self.rounds) > 1 and (summary := self.summary(self.rounds)):
            output.write("\n".join([f"all {len(self.rounds)} prompts", *summary]) + "\n")
        missing = any(round.score_failed or any(reply.failed for reply in round.replies) for round in self.rounds)
        return exit_codes.ENGINE_ERROR if missing else exit_codes.OK

    def _write(self, path: str, text: str, more: bool) -> None:
        try:
            with Path(path).expanduser().open("a" if more else "w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.write(text)
        except OSError as error:
            raise Failed(f"{path}: cannot be written: {error.strerror or error}", exit_codes.ENGINE_ERROR) from error

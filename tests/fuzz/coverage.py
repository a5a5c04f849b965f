"""Which lines of the product an input reaches: inputs that reach new ones are worth breaking further."""
from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class Coverage:
    """`with coverage:` around a run; `found` is whether it reached a line for the first time, `lines` how many were reached so far.

    From Python 3.12 on a line that was seen costs nothing (sys.monitoring); before, frames are traced until all their lines were seen.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._unseen: dict[CodeType, set[int]] = {}
        self._foreign: set[CodeType] = set()
        self._monitoring = getattr(sys, "monitoring", None)
        self.lines = 0
        self.found = False
        if self._monitoring:
            tool, line = self._monitoring.COVERAGE_ID, self._monitoring.events.LINE
            self._monitoring.use_tool_id(tool, "fuzz")
            self._monitoring.register_callback(tool, line, self._line)
            self._monitoring.set_events(tool, line)

    def __enter__(self) -> None:
        self.found = False
        if not self._monitoring:
            sys.settrace(self._call)

    def __exit__(self, *error: object) -> None:
        if not self._monitoring:
            sys.settrace(None)

    def _line(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(self._folder):
            self.lines += 1
            self.found = True
        return self._monitoring.DISABLE

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code in self._foreign:
            return None
        unseen = self._unseen.get(code)
        if unseen is None:
            if not code.co_filename.startswith(self._folder):
                self._foreign.add(code)
                return None
            unseen = self._unseen[code] = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
        return self._trace if unseen else None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        unseen = self._unseen[frame.f_code]
        if event == "line" and frame.f_lineno in unseen:
            unseen.discard(frame.f_lineno)
            self.lines += 1
            self.found = True
        return self._trace

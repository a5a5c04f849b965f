"""Rendering chat templates in a process of their own, from the engine's side."""
from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from typing import Any

MAX_TEMPLATE_CHARACTERS = 1 << 20
_CHILD = ["-P", "-m", f"{__package__}.template_process"]


class ChatTemplateError(ValueError):
    """A chat template could not be rendered. The message says why and that raw text works without it."""


class TemplateRenderer:
    """One child process, started at the first rendering and again after a template was its end. Safe for threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """The text. `variables` is plain JSON data.

        Raises ChatTemplateError when the template is wrong, refuses, or needs more time or memory than it may.
        """
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise _error(f"has {len(template):,} characters, over the limit of {MAX_TEMPLATE_CHARACTERS:,}")
        with self._lock:
            answer = self._ask(json.dumps({"template": template, "variables": variables}).encode() + b"\n")
        if "text" not in answer:
            raise _error(answer["error"])
        return answer["text"]

    def _ask(self, line: bytes) -> dict[str, str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, *_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self.close()
        return {"error": "takes more than its limit of 2 s of processor time or 512 MB of memory"}

    def close(self) -> None:
        """End the child; a later rendering starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _error(why: str) -> ChatTemplateError:
    plain = "".join(character if character.isprintable() else " " for character in why)
    return ChatTemplateError(f"the model's chat template {plain}; send raw text, or fix the template in the model's files")


RENDERER = TemplateRenderer()
"""shared: it holds no state between renderings"""
atexit.register(RENDERER.close)

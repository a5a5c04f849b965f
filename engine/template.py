"""Rendering chat templates in a process of their own, from the engine's side."""
from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
import time
from typing import Any

MAX_TEMPLATE_CHARACTERS = 1 << 20
WAIT_SECONDS = 10.0
"""that the engine waits for a rendering, whose processor time has its own, shorter limit"""
_CHILD = ["-P", "-m", f"{__package__}.template_process"]


class ChatTemplateError(ValueError):
    """A chat template could not be rendered. The message says why and that raw text works without it."""


class TemplateRenderer:
    """One child process, started at the first rendering and again after a template was its end. Safe for threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._killed = False
        """whether the child that ended last was killed, not stopped by its own limits"""

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

    def start(self) -> None:
        """Start the child ahead of the first rendering; returns at once."""
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, *_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )
        return self._process

    def _ask(self, line: bytes) -> dict[str, str]:
        began = time.monotonic()
        answer = self._answer(line)
        if not answer and self._killed and time.monotonic() - began < WAIT_SECONDS:
            answer = self._answer(line)  # somebody else ended the child, perhaps before it was asked: once more
        if answer:
            return json.loads(answer)
        return {"error": f"takes more than its limit of 2 s of processor time, {WAIT_SECONDS:g} s in all, or 512 MB of memory"}

    def _answer(self, line: bytes) -> bytes:
        """The child's line; nothing, with the child ended, when it gave none."""
        process = self._running()
        killer = threading.Timer(WAIT_SECONDS, process.kill)  # also ends a write or a read that waits for a child that stands still
        killer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            killer.cancel()
        if answer.endswith(b"\n"):
            return answer
        self._killed = process.wait() == -signal.SIGKILL
        self.close()
        return b""

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

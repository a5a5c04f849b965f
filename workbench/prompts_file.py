"""Prompts out of a file of JSON lines."""
from __future__ import annotations

import json
import os

import msgspec

from ..engine.protocol import Chat, Message, Prompt, RawText, TokenIds
from .arguments import UsageError

MAX_BYTES = 64 << 20
MAX_PROMPTS = 10_000
_EXPECTED = ('a line is a JSON string, or an object with "prompt" (a text) or "messages" ([{"role": ..., "content": ...}]), '
             "as the lines of a report have it")


def read_prompts(path: str, system: str | None, opening: str) -> tuple[Prompt, ...]:
    """The prompts of a file. `system` goes before those that are a text alone, `opening` behind them.

    Raises UsageError that names the file and the line.
    """
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(MAX_BYTES + 1)
        lines = content.decode("utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}; give a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not text in UTF-8: {error.reason} at byte {error.start}") from error
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: is larger than {MAX_BYTES >> 20} MiB; split it")
    prompts = tuple(_prompt(path, number, line, system, opening) for number, line in enumerate(lines, 1) if line.strip())
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise UsageError(f"{path}: holds {len(prompts):,} prompts; 1 to {MAX_PROMPTS:,} are expected, one a line")
    return prompts


def chat_of(text: str, system: str | None, opening: str) -> Chat:
    roles = [("system", system)] if system else []
    return Chat(tuple(Message(role, words) for role, words in [*roles, ("user", text)]), opening)


def _prompt(path: str, number: int, line: str, system: str | None, opening: str) -> Prompt:
    try:
        value = json.loads(line)
        prompt = _meant(value["prompt"] if isinstance(value, dict) and "prompt" in value else value, system, opening)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}: {error}; {_EXPECTED}") from error
    if prompt is None:
        raise UsageError(f"{path}, line {number}: holds no prompt; {_EXPECTED}")
    return prompt


def _meant(value: object, system: str | None, opening: str) -> Prompt | None:
    """Raises ValueError (msgspec's among them) for what looks like a prompt and is none."""
    match value:
        case str() if value.strip():
            return chat_of(value, system, opening)
        case {"messages": list(messages)} if messages:
            return Chat(msgspec.convert(messages, tuple[Message, ...]), msgspec.convert(value.get("opening", ""), str))
        case {"text": str(text)} if text:
            return RawText(text)
        case {"ids": list(ids)} if ids:
            return TokenIds(msgspec.convert(ids, tuple[int, ...]))
    return None

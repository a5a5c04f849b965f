"""A prompt in one line."""
from __future__ import annotations

from ..engine.protocol import Chat, Prompt, RawText
from .text import clean_line


def prompt_line(prompt: Prompt) -> str:
    """How its last message begins; cleaned."""
    match prompt:
        case Chat() if prompt.messages:
            text = prompt.messages[-1].content
        case RawText():
            text = prompt.text
        case _:
            text = "token ids"
    return clean_line(text.strip(), 60)

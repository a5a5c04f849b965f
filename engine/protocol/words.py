"""Words that commands and events share."""
from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Struct(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything that travels: immutable, tagged with its class name."""


def plain_data(value: object) -> object:
    """Plain data for JSON: every field of every structure, also those at their defaults, and without the tags of the wire."""
    if isinstance(value, msgspec.Struct):
        return {name: plain_data(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain_data(item) for key, item in value.items()}
    return [plain_data(item) for item in value] if isinstance(value, (list, tuple)) else value


SCORE_IDS = -2_000_000
"""and below: numbers of the rows of a score"""


def requests_text(users: Iterable[int]) -> str:
    """Who computes, in words: `requests 3, 4 and an adapter check`.

    Requests that no person made have negative numbers, those of a score the lowest.
    """
    numbers = set(users)
    people = [str(number) for number in sorted(numbers) if number >= 0]
    check = "an adapter check" if any(SCORE_IDS < number < 0 for number in numbers) else ""
    score = "the reading of a text" if any(number <= SCORE_IDS for number in numbers) else ""
    return " and ".join(filter(None, (f"request{'s' if len(people) > 1 else ''} {', '.join(people)}" if people else "", check, score)))


class AdapterUse(Struct):
    """One adapter in a mix. `scale` is what the user sets: 1 is as trained, 0 is off, negative is allowed."""

    name: str
    scale: float = 1.0


Mix = tuple[AdapterUse, ...]


class Message(Struct):
    role: str
    content: str


class Chat(Struct):
    """Messages for the model's chat template.

    `opening` is text put after the messages instead of the template's generation prompt; special
    tokens in it are parsed. It is how an aLoRA's invocation is asked for.
    """

    messages: tuple[Message, ...]
    opening: str = ""


class RawText(Struct):
    """Text that is tokenised as it stands, special tokens parsed, no template."""

    text: str


class TokenIds(Struct):
    ids: tuple[int, ...]


Prompt = Chat | RawText | TokenIds


class Sampling(Struct):
    """How a token is drawn. `temperature` 0 is greedy; 0 / 1.0 / 0.0 / 1.0 switch top_k / top_p / min_p / penalty off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()

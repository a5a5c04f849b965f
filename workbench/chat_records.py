"""A chat as records, each a line of JSON: what is put down while it grows, and the chat that they make again.

A record changes nothing that lies before it, so every whole number of lines is the chat as it was at some moment.
"""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..engine.protocol import LoadModel, Message, Sampling
from .state import StartAdapter
from .transcript import Turn, Version

FORMAT = 1
ENDED_HERE = "lora-bench ended while this was written; Ctrl+R asks again"
_APART = ("request_id", "history", "text")
"""fields of a version that are put down in ways of their own"""


class Record(msgspec.Struct, frozen=True, tag_field="is", tag=str.lower):
    """Base of the kinds of lines."""


class Began(Record):
    """The first line of a file."""

    format: int
    at: str
    """local time, ISO 8601"""


class Bench(Record):
    """What the chat was held with from here on."""

    load: LoadModel | None
    model: str
    """its name; "" before one was loaded"""
    adapters: tuple[StartAdapter, ...] = ()
    system: str = ""
    sampling: Sampling = Sampling()


class Said(Record):
    """A message of a prompt; histories name messages by their number in the file."""

    message: Message


class Facts(Record):
    """All of a version but its text. A first one begins it, and its turn too; then it says what was `asked`, and the history."""

    turn: int
    version: int
    facts: dict[str, Any]
    asked: str | None = None
    history: tuple[int, ...] = ()


class Wrote(Record):
    """The text of a version from character `at` on."""

    turn: int
    version: int
    at: int
    text: str


class Shown(Record):
    """The version of a turn that is looked at."""

    turn: int
    version: int


@dataclass
class PastChat:
    """A chat that was put down. Versions have request id 0."""

    began: Began
    bench: Bench = Bench(None, "")
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def line_of(record: Record) -> bytes:
    """One line; text that is no Unicode (lone surrogates) comes back as it was."""
    return json.dumps(msgspec.to_builtins(record), separators=(",", ":")).encode() + b"\n"


def read_lines(data: bytes) -> tuple[PastChat | None, int, str]:
    """The chat, the bytes that it takes, and why no more of them do ("" when all do); None where not even the first line can be read."""
    chat: PastChat | None = None
    taken = 0
    while taken < len(data):
        end = data.find(b"\n", taken)
        try:
            if end < 0:
                raise ValueError("it is cut")
            record = msgspec.convert(json.loads(data[taken:end]), Began | Bench | Said | Facts | Wrote | Shown)
            if chat is None:
                chat = _begin(record)
            else:
                _add(chat, record)
        except (msgspec.ValidationError, ValueError, LookupError, TypeError, RecursionError) as error:
            number = data.count(b"\n", 0, taken) + 1
            return chat, taken, f"line {number} cannot be read: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
        taken = end + 1
    return chat, taken, "" if chat else "it is empty"


def _begin(record: Record) -> PastChat:
    if not isinstance(record, Began):
        raise ValueError("it does not begin as a chat does")
    if record.format != FORMAT:
        raise ValueError(f"it is of format {record.format}, this lora-bench knows {FORMAT}")
    return PastChat(record)


def _add(chat: PastChat, record: Record) -> None:
    """Raises LookupError, TypeError or ValueError for a record that does not fit what came before."""
    match record:
        case Bench():
            chat.bench = record
        case Said():
            chat.messages.append(record.message)
        case Facts():
            _take_facts(chat, record)
        case Wrote():
            version = chat.turns[record.turn].versions[record.version]
            version.text = version.text[:record.at] + record.text
        case Shown():
            turn = chat.turns[record.turn]
            if not 0 <= record.version < len(turn.versions):
                raise ValueError(f"there is no version {record.version}")
            turn.shown = record.version
        case _:
            raise ValueError("a second beginning")


def _take_facts(chat: PastChat, record: Facts) -> None:
    version = msgspec.convert({**record.facts, "request_id": 0, "history": ()}, Version)
    if version.active:
        version.phase, version.note = "lost", ENDED_HERE
    if record.asked is None:
        old = chat.turns[record.turn].versions[record.version]
        version.history, version.text = old.history, old.text
        chat.turns[record.turn].versions[record.version] = version
        return
    version.history = tuple(chat.messages[number] for number in record.history)
    turn = Turn(record.asked) if record.turn == len(chat.turns) else chat.turns[record.turn]
    if record.version != len(turn.versions):
        raise ValueError(f"version {record.version} follows {len(turn.versions)} versions")
    turn.add(version)
    if record.turn == len(chat.turns):
        chat.turns.append(turn)


@dataclass
class _Noted:
    """How far a version is put down."""

    characters: int
    facts: dict[str, Any]
    ended: bool


class Recorder:
    """What of a chat is not put down yet. `past`: what is already."""

    def __init__(self, past: PastChat | None = None) -> None:
        self._messages: dict[Message, int] = {}
        self._noted: dict[tuple[int, int], _Noted] = {}
        self._shown: list[int] = []
        self._bench: Bench | None = None
        if past:
            self.news(past.bench, past.turns)
            self._messages = {message: number for number, message in reversed(list(enumerate(past.messages)))}

    def news(self, bench: Bench, turns: list[Turn], leaving: bool = False) -> list[Record]:
        """The records since the last time. A scale that is dragged is none: the bench is put down with a new version, and at the end."""
        records = list(self._of_turns(turns))
        if bench != self._bench and (leaving or any(isinstance(record, Facts) and record.asked is not None for record in records)):
            self._bench = bench
            records.insert(0, bench)
        return records

    def _of_turns(self, turns: list[Turn]) -> Iterable[Record]:
        for number, turn in enumerate(turns):
            for at, version in enumerate(turn.versions):
                noted = self._noted.get((number, at))
                if noted is None or not noted.ended:
                    yield from self._of_version(number, at, turn.asked, version, noted)
            if self._shown[number] != turn.shown:
                self._shown[number] = turn.shown
                yield Shown(number, turn.shown)

    def _of_version(self, number: int, at: int, asked: str, version: Version, noted: _Noted | None) -> Iterable[Record]:
        facts = {key: value for key, value in msgspec.to_builtins(version).items() if key not in _APART}
        if noted is None:
            for message in version.history:
                if message not in self._messages:
                    self._messages[message] = len(self._messages)
                    yield Said(message)
            yield Facts(number, at, facts, asked, tuple(self._messages[message] for message in version.history))
            noted = self._noted[number, at] = _Noted(0, facts, False)
            self._shown[number:number + 1] = [at]
        elif facts != noted.facts:
            yield Facts(number, at, facts)
        if len(version.text) != noted.characters:
            start = min(noted.characters, len(version.text))
            yield Wrote(number, at, start, version.text[start:])
        noted.facts, noted.characters, noted.ended = facts, len(version.text), not version.active

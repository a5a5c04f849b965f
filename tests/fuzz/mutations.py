"""Breaking bytes, blindly and as JSON."""
from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

NASTY = [0, 1, 2, 3, 7, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 64,
         2**64 - 1]
CHUNKS = [b"\xff" * 8, b"\0" * 8, b"\x1b]0;x\x07", b"[" * 500, b"{\"a\":" * 200, b"-1", b"1e999", b"NaN", b"\"", b"\\ud800",
          "\u202e漢".encode(),
          b"\xc0\xaf", b"../../../../etc/passwd", b"\r\n", b"%s%n", b"/dev/zero"]
TEXTS = ["", " ", ".", "..", "/", "../x", "/etc/passwd", "/dev/zero", "\0", "\x1b[31m", "\u202e", "\ud800", "😀", "a" * 70_000, "[/bold]",
         "%s%n", "NaN", "-1",
         "(a+)+$", "(.*)*", "[", "\\", "(?P<x>", "a{99999}", "__class__", "null", "\u2028", "e\u0301" * 50]
NUMBERS: list[Any] = [*NASTY, -1, -(2**31), -(2**63), 10**40, 0.0, -0.0, 0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"), 1.5]


def blind(data: bytes, other: bytes, random: Random, head: int = 4096) -> bytes:
    """One to eight changes without any idea of the format, mostly in the first `head` bytes."""
    result = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        if not result:
            break
        place = random.randrange(min(len(result), head) if random.random() < 0.8 else len(result))
        _BLIND[random.choices(range(len(_BLIND)), (6, 4, 3, 2, 2, 2, 3, 3))[0]](result, place, other, random)
    return bytes(result)


def _integer(data: bytearray, place: int, other: bytes, random: Random) -> None:
    width = random.choice((1, 2, 4, 8, 8))
    value = random.choice(NASTY) if random.random() < 0.7 else random.getrandbits(64)
    data[place:place + width] = struct.pack(random.choice("<>") + "Q", value & 2**64 - 1)[:width]


def _flip(data: bytearray, place: int, other: bytes, random: Random) -> None:
    data[place] ^= 1 << random.randrange(8)


def _cut(data: bytearray, place: int, other: bytes, random: Random) -> None:
    del data[place:place + random.choice((1, 4, 8, 100, 5000))]


def _repeat(data: bytearray, place: int, other: bytes, random: Random) -> None:
    data[place:place] = data[place:place + random.choice((1, 8, 64, 1000))] * random.choice((1, 2, 50))


def _end(data: bytearray, place: int, other: bytes, random: Random) -> None:
    del data[place + random.randrange(64):]


def _splice(data: bytearray, place: int, other: bytes, random: Random) -> None:
    if other:
        start = random.randrange(len(other))
        data[place:place + 64] = other[start:start + random.choice((8, 64, 512))]


def _insert(data: bytearray, place: int, other: bytes, random: Random) -> None:
    data[place:place] = random.choice(CHUNKS)


def _digits(data: bytearray, place: int, other: bytes, random: Random) -> None:
    found = list(re.finditer(rb"-?\d+", bytes(data[:20_000])))
    if found:
        chosen = random.choice(found)
        data[chosen.start():chosen.end()] = str(random.choice([*NASTY, -1, -(2**63)])).encode()


_BLIND = (_integer, _flip, _cut, _repeat, _end, _splice, _insert, _digits)


def json_tree(value: Any, random: Random, words: Sequence[str] = ()) -> Any:
    """A copy of a JSON value with one place in it changed; `words` are keys and texts that mean something to the reader."""
    places: list[tuple[Any, Any]] = []
    value = json.loads(json.dumps(value))
    _collect(value, places)
    if not places:
        return _any(random, words)
    holder, key = random.choice(places)
    chance = random.random()
    if chance < 0.15:
        del holder[key]
    elif chance < 0.3 and isinstance(holder, dict):
        name = random.choice([*words, *TEXTS]) if random.random() < 0.8 else str(key)[:20] + "x"
        holder[name] = random.choice((holder[key], _any(random, words)))
    elif chance < 0.4 and isinstance(holder, list):
        holder[key:key] = [holder[key]] * random.choice((1, 3, 300))
    elif chance < 0.5 and isinstance(holder, dict):
        holder[random.choice([*words, *map(str, holder)])] = holder.pop(key)
    else:
        holder[key] = _like(holder[key], random, words)
    return value


def _collect(value: Any, places: list[tuple[Any, Any]], depth: int = 0) -> None:
    if depth > 60 or len(places) > 20_000:
        return
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        places.append((value, key))
        _collect(value[key], places, depth + 1)


def _like(value: Any, random: Random, words: Sequence[str]) -> Any:
    if type(value) in (int, float) and random.random() < 0.6:
        return random.choice([*NUMBERS, value + 1, value - 1, -value, value * 2, str(value), float(value) if abs(value) < 1e300 else 0.0])
    if isinstance(value, str) and random.random() < 0.5:
        return random.choice([value + random.choice(TEXTS), value[:-1], value.upper(), value * 3, [value], *words])
    if random.random() < 0.2:
        return [value]
    return _any(random, words)


def _any(random: Random, words: Sequence[str]) -> Any:
    texts = [*TEXTS, *words]
    kinds = (
        lambda: None, lambda: random.random() < 0.5, lambda: random.choice(NUMBERS), lambda: random.choice(texts), lambda: [], lambda: {},
        lambda: [random.choice(NUMBERS) for _ in range(random.choice((1, 2, 4, 2000)))], lambda: [random.choice(texts)],
        lambda: {random.choice(texts): random.choice(NUMBERS)}, lambda: {random.choice(texts): random.choice(texts)},
        lambda: [[random.choice(NUMBERS), random.choice(NUMBERS)]], lambda: [random.choice(texts), random.choice(texts)],
    )
    return random.choice(kinds)()


def json_text(value: Any, random: Random) -> bytes:
    """`value` as JSON, now and then with what only the text can have: doubled keys, nesting without end, other encodings."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.8)
    chance = random.random()
    if chance < 0.03 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + "," + text[1:]
    elif chance < 0.06:
        text = text.replace(": ", ": " + random.choice(("[" * 50_000, "{\"a\":" * 5000, "-", "1" * 5000, "1e400 ")), 1)
    elif chance < 0.08:
        return text.encode(random.choice(("utf-16", "utf-8-sig", "utf-32")), "surrogatepass")
    return text.encode("utf-8", "surrogatepass")


def mutate_json(data: bytes, other: bytes, random: Random, words: Sequence[str] = ()) -> bytes:
    """Mostly a changed tree; blind changes for what is no JSON any more, and now and then."""
    if random.random() < 0.85:
        try:
            value = json.loads(data)
            for _ in range(random.choice((1, 1, 1, 2, 4))):
                value = json_tree(value, random, words)
            return json_text(value, random)
        except (ValueError, RecursionError):
            pass
    return blind(data, other, random, head=1 << 16)


def mutate_safetensors(data: bytes, other: bytes, random: Random, words: Sequence[str]) -> bytes:
    """The JSON of the header changed, its length mostly right; else blind changes, or other numbers in the tensors."""
    length = int.from_bytes(data[:8], "little")
    if length < len(data) and random.random() < 0.1:
        return data[:8 + length] + blind(data[8 + length:], b"", random)[:len(data) - 8 - length].ljust(len(data) - 8 - length, b"\0")
    if random.random() < 0.85:
        try:
            header = json.loads(data[8:8 + length])
            for _ in range(random.choice((1, 1, 2, 3))):
                header = json_tree(header, random, words)
            text = json_text(header, random)
            stated = len(text) if random.random() < 0.9 else random.choice((0, 1, max(len(text) - 1, 0), len(text) + 1, 1 << 40, 1 << 63))
            return stated.to_bytes(8, "little") + text + data[8 + length:]
        except (ValueError, RecursionError):
            pass
    return blind(data, other, random, head=8 + min(length, 1 << 16))

"""Keys of KV blocks: all tokens up to the end of a block, and what acted on each of them.

Two chains say so. The token key of a block is hash(token key of the block before, its ids). What acted is a `History`: hash(the one
before, from which token on, the adapters by digest and scale in their order); it changes only where other adapters begin to act. A block's
key is both: what has equal keys was computed from equal numbers. Names, and how a mix came about, are not in it.
"""
from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from .blocks import BLOCK_TOKENS
from .stretches import Acting, Stretch

NO_TOKENS = b""
"""the token key before the first block"""
ID_BYTES = array("I").itemsize
BLOCK_BYTES = BLOCK_TOKENS * ID_BYTES
"""of the ids of a whole block"""


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, `ID_BYTES` each."""
    return array("I", ids).tobytes()


def token_key(before: bytes, ids: bytes) -> bytes:
    """The token key of a block that holds `ids` (see `packed`) and follows the one with the token key `before`."""
    return blake2b(before + ids, digest_size=32).digest()


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What acted on the tokens of a request: `acting` from token `start` on, and what is in `before` on those before it."""

    key: bytes
    """32 bytes; with a token key it is the key of a block"""
    names: bytes
    """the same of the names alone: how a cache that knows adapters by name tells blocks apart"""
    start: int
    acting: tuple[Acting, ...]
    before: History | None

    def at(self, tokens: int) -> History:
        """What of it concerns the first `tokens` tokens."""
        history = self
        while history.before is not None and history.start >= tokens:
            history = history.before
        return history

    def steps(self) -> list[History]:
        """From the root (nothing acts) to this one, without those that differ from the one before in names alone."""
        steps: list[History] = []
        history: History | None = self
        while history is not None:
            if history.before is None or history.key != history.before.key:
                steps.append(history)
            history = history.before
        return steps[::-1]


class Timeline:
    """The stretches of a request as histories. Stretches that change nothing are not in it, so they keep nobody from sharing."""

    __slots__ = ("_starts", "histories")

    def __init__(self, stretches: Sequence[Stretch], root: bytes = b"") -> None:
        """`stretches` ascend by `start`; of several with one start the last holds. `root`: what else the numbers depend on."""
        nothing = blake2b(root, digest_size=32).digest()
        self.histories = [History(nothing, nothing, 0, (), None)]
        for index, stretch in enumerate(stretches):
            if index + 1 < len(stretches) and stretches[index + 1].start <= stretch.start:
                continue
            if stretch.acting != self.histories[-1].acting:
                self.histories.append(_following(self.histories[-1], stretch))
        self._starts = [history.start for history in self.histories[1:]]

    def at(self, tokens: int) -> History:
        """What concerns the first `tokens` tokens."""
        return self.histories[bisect.bisect_left(self._starts, tokens)]

    @property
    def last(self) -> History:
        return self.histories[-1]

    def base_tokens(self, tokens: int) -> int:
        """Of the first `tokens` tokens, those on which nothing acts."""
        ends = [*self._starts, tokens]
        return sum(max(0, min(end, tokens) - min(history.start, tokens))
                   for history, end in zip(self.histories, ends, strict=True) if not history.acting)


def block_keys(ids: Sequence[int], stretches: Sequence[Stretch]) -> Iterator[bytes]:
    """The keys of the whole blocks among `ids`, computed under `stretches`."""
    timeline, key, rest = Timeline(stretches), NO_TOKENS, packed(ids)
    for number in range(len(ids) // BLOCK_TOKENS):
        key = token_key(key, rest[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
        yield key + timeline.at((number + 1) * BLOCK_TOKENS).key


def same_beginning(a: bytes, b: bytes) -> int:
    """How many packed ids at the beginning of both are equal."""
    if a == b:
        return len(a) // ID_BYTES
    count, most = 0, min(len(a), len(b)) // ID_BYTES
    while count < most and a[count * ID_BYTES : (count + 1) * ID_BYTES] == b[count * ID_BYTES : (count + 1) * ID_BYTES]:
        count += 1
    return count


def _counting(acting: Sequence[Acting]) -> tuple[tuple[str, float], ...]:
    return tuple((each.digest, each.scale) for each in acting)


def _following(last: History, stretch: Stretch) -> History:
    key, names = last.key, last.names
    if _counting(stretch.acting) != _counting(last.acting):
        key = _hash(key, stretch.start, [part for each in stretch.acting for part in (each.digest, float(each.scale).hex())])
    if (now := sorted(each.name for each in stretch.acting)) != sorted(each.name for each in last.acting):
        names = _hash(names, stretch.start, now)
    return History(key, names, stretch.start, stretch.acting, last)


def _hash(before: bytes, start: int, words: Sequence[str]) -> bytes:
    return blake2b(before + repr((start, words)).encode(), digest_size=32).digest()

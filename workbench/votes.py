"""Blind votes between two mixes, kept across runs: a line of JSON for each pair that was ever compared, with its counts.

A pair is what was computed, not what it was called: the base, and of each side the digest, scale and invocation of every adapter. The file
is replaced as a whole under a lock, so a kill leaves the votes of before or after; a line that cannot be read is never thrown away
unsaid: the file as it was is kept aside, and the lines that can be read go on.
"""
from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from ..engine.protocol import AdapterInfo, Mix, ModelInfo
from .mixboard import mix_text
from .text import clean_line
from .whole_files import aside, replace_file

Choice = Literal["first", "second", "tie", "bad"]
MAX_BYTES = 16 << 20
CONFIDENCE_Z = 1.959964
"""two-sided 95 %"""
LOCK_TRIES, LOCK_PAUSE_S = 40, 0.02


class Acted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """One adapter of a side, by what it holds."""

    digest: str
    scale: float
    invocation: tuple[int, ...] = ()


Side = tuple[Acted, ...]


class Tally(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The votes between two sides. Names are those of the latest vote, for people who read the file."""

    model: str
    sides: tuple[Side, Side]
    """in their sorted order"""
    names: tuple[str, str]
    first: int = 0
    second: int = 0
    tie: int = 0
    bad: int = 0

    @property
    def total(self) -> int:
        return self.first + self.second + self.tie + self.bad

    def turned(self) -> Tally:
        """The same with the sides exchanged."""
        return msgspec.structs.replace(self, sides=self.sides[::-1], names=self.names[::-1], first=self.second, second=self.first)


def model_key(model: ModelInfo) -> str:
    """What tells one base from another: its name and how large it is in its file and in numbers."""
    return f"{clean_line(model.name)} {model.format} {model.parameters} {model.file_bytes}"


def side_of(mix: Mix, adapters: Mapping[str, AdapterInfo]) -> Side:
    """What a mix computes; the order counts only beside a DoRA. Raises KeyError for an adapter that is not known."""
    acting = [use for use in mix if use.scale != 0]
    side = tuple(Acted(adapters[use.name].digest, use.scale, adapters[use.name].invocation_tokens) for use in acting)
    return side if any(adapters[use.name].dora for use in acting) else tuple(sorted(side))


def tally_of(model: ModelInfo, mixes: tuple[Mix, Mix], adapters: Mapping[str, AdapterInfo]) -> Tally:
    """The pair of these two mixes without a vote, `first` the first mix."""
    first, second = (side_of(mix, adapters) for mix in mixes)
    return Tally(model_key(model), (first, second), (clean_line(mix_text(mixes[0])), clean_line(mix_text(mixes[1]))))


def wilson(wins: int, votes: int) -> tuple[float, float]:
    """The 95 % score interval of a share of `wins` in `votes`; (0, 1) without votes.

    E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", J. Am. Stat. Assoc. 22 (158), 1927, 209-212.
    """
    if votes == 0:
        return 0.0, 1.0
    share, z2 = wins / votes, CONFIDENCE_Z ** 2
    middle = (share + z2 / (2 * votes)) / (1 + z2 / votes)
    half = CONFIDENCE_Z / (1 + z2 / votes) * math.sqrt(share * (1 - share) / votes + z2 / (4 * votes ** 2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


class VoteFile:
    """The votes at `path`. Methods read the file anew: another bench may have voted. Problems are sentences, never exceptions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def counts(self, pair: Tally) -> tuple[Tally, str]:
        """The votes so far between the sides of `pair`, in its order; and what is wrong with the file, "" when nothing is."""
        try:
            tallies, damage = self._read()
        except OSError as error:
            return pair, f"{self.path} cannot be read ({error.strerror or error}): the votes of before are not known"
        problem = f"{self.path} is damaged ({damage}): the next vote keeps it aside and goes on with what can be read" if damage else ""
        return _in_order_of(pair, tallies.get(_key(pair))), problem

    def add(self, pair: Tally, choice: Choice) -> tuple[Tally, str]:
        """Count one vote and keep it. The votes with it, and a sentence when it could not be kept or the file was damaged."""
        said = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                tallies, damage = self._read()
                if damage:
                    said = f"{self.path} was damaged ({damage}); as it was it is kept as {self._keep_aside().name}"
                counted = _voted(_in_order_of(pair, tallies.get(_key(pair))), choice)
                tallies[_key(pair)] = _sorted(counted)
                replace_file(self.path, b"".join(msgspec.json.encode(tally) + b"\n" for tally in tallies.values()))
        except OSError as error:
            known, _ = self.counts(pair)
            return _voted(known, choice), f"the vote was not kept: {self.path} cannot be written ({error.strerror or error})"
        return counted, said

    def _read(self) -> tuple[dict[tuple, Tally], str]:
        """The votes by pair, and what is wrong with lines that are none. Raises OSError; a file that is not there has no votes."""
        if not self.path.exists():
            return {}, ""
        if not self.path.is_file():
            raise OSError("it is not a plain file")
        with self.path.open("rb") as handle:
            data = handle.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            return {}, f"it is larger than {MAX_BYTES >> 20} MiB"
        tallies: dict[tuple, Tally] = {}
        damage = ""
        for number, line in enumerate(data.splitlines(), 1):
            try:
                tally = msgspec.json.decode(line, type=Tally)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                damage = damage or f"line {number}: {error}"
                continue
            if min(tally.first, tally.second, tally.tie, tally.bad) < 0 or tally.sides != _sorted(tally).sides or _key(tally) in tallies:
                damage = damage or f"line {number}: counts below zero, or a pair that stands there twice"
                continue
            tallies[_key(tally)] = tally
        return tallies, damage

    def _keep_aside(self) -> Path:
        """A copy of the file as it is under a name that is free: the lines that can be read go on under its own."""
        kept = aside(self.path)
        with self.path.open("rb") as source, kept.open("xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        return kept

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One bench at a time; the lock ends with the process that holds it."""
        with self.path.with_name(f".{self.path.name}.lock").open("wb") as handle:
            for left in reversed(range(LOCK_TRIES)):
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not left:
                        raise OSError("another bench does not let go of it") from None
                    time.sleep(LOCK_PAUSE_S)
            yield


def _key(tally: Tally) -> tuple:
    return tally.model, tuple(sorted(tally.sides))


def _sorted(tally: Tally) -> Tally:
    return tally if tally.sides[0] <= tally.sides[1] else tally.turned()


def _in_order_of(pair: Tally, kept: Tally | None) -> Tally:
    """`kept` as seen from `pair`; without it `pair` itself, which has no votes."""
    if kept is None:
        return pair
    seen = kept if kept.sides == pair.sides else kept.turned()
    return msgspec.structs.replace(seen, names=pair.names)


def _voted(tally: Tally, choice: Choice) -> Tally:
    return msgspec.structs.replace(tally, **{choice: getattr(tally, choice) + 1})

"""A naive KV memory, for the tests of the real one: it keeps every token's whole past and searches all that was ever kept.

A cell's truth stands for its keys and values: a number for (the truth of the cell before it, token, what acts on the token). Two cells have
one truth exactly when everything that their numbers depend on is the same.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_bench.engine.protocol import CacheUse, MissedRun
from lora_bench.engine.stretches import Acting, Stretch

BLOCK = 16
Truth = int
Mixed = tuple[Acting, ...]
Chain = tuple[Truth, ...]
"""the truths of the tokens of one block, whole or not"""


class Truths:
    """Numbers for what a cell was computed from."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], Truth] = {}

    def of(self, *past: object) -> Truth:
        return self._numbers.setdefault(past, len(self._numbers))

    def all(self, ids: Sequence[int], stretches: Sequence[Stretch], root: bytes) -> list[Truth]:
        """Of every token of a request."""
        before, truths = self.of("root", root), []
        for token, acting in zip(ids, acting_on(stretches, len(ids)), strict=True):
            before = self.of(before, token, tuple((use.digest, use.scale) for use in acting))
            truths.append(before)
        return truths


def acting_on(stretches: Sequence[Stretch], tokens: int) -> list[Mixed]:
    """What acts on each of the first `tokens` tokens."""
    return [next((stretch.acting for stretch in reversed(stretches) if stretch.start <= at), ()) for at in range(tokens)]


@dataclass
class Model:
    """A request as the tests know it."""

    ids: list[int]
    stretches: tuple[Stretch, ...]
    root: bytes = b""

    def acting(self) -> list[Mixed]:
        return acting_on(self.stretches, len(self.ids))

    def last_mix(self) -> frozenset[tuple[str, float]]:
        """By content and scale."""
        return frozenset((use.digest, use.scale) for use in self.stretches[-1].acting)

    def is_late(self) -> bool:
        """Whether something acts at last and nothing does on the first token."""
        return bool(self.stretches[-1].acting) and not acting_on(self.stretches, 1)[0]


@dataclass
class Kept:
    """The content of a block that could be found at some time: all its past, and what became of it."""

    ids: tuple[int, ...]
    """from the first token of the request to the last of the block"""
    acting: tuple[Mixed, ...]
    root: bytes
    truths: tuple[Truth, ...]
    block: int
    """-1 when it is gone"""
    user: int
    """who computed it"""
    gone: str = ""
    """"evicted", "cleared", or "dropped" where nobody is told of it"""
    because: str = ""
    """what the sentence about it must hold"""

    @property
    def first(self) -> int:
        """Index of the first token of the block."""
        return (len(self.ids) - 1) // BLOCK * BLOCK

    def go(self, how: str, because: str = "") -> None:
        """It cannot be found any more."""
        self.block, self.gone, self.because = -1, how, because

    @property
    def chain(self) -> Chain:
        return self.truths[self.first:]

    def agrees(self, truths: Sequence[Truth]) -> int:
        """How many tokens of its block are computed as `truths` say; 0 when what is before it is not."""
        if self.first and self.truths[self.first - 1] != truths[self.first - 1]:
            return 0
        return next((i for i, (a, b) in enumerate(zip(self.chain, truths[self.first:], strict=False)) if a != b),
                    min(len(self.chain), len(truths) - self.first))


@dataclass
class KeptContents:
    """All that can be found now, and all that once could."""

    all: list[Kept] = field(default_factory=list)

    @property
    def present(self) -> list[Kept]:
        return [kept for kept in self.all if kept.block >= 0]

    def of_block(self, block: int) -> Kept | None:
        return next((kept for kept in self.present if kept.block == block), None)

    def add(self, model: Model, truths: Sequence[Truth], end: int, block: int, user: int) -> None:
        """The tokens up to `end` are computed and end a block: it can be found, unless another one begins with the same. Those that are
        its own beginning are given up for it."""
        new = Kept(tuple(model.ids[:end]), tuple(model.acting()[:end]), model.root, tuple(truths[:end]), block, user)
        alike = [kept for kept in self.present if kept.first == new.first
                 and kept.agrees(new.truths) == min(len(kept.chain), len(new.chain))]
        if any(len(kept.chain) >= len(new.chain) for kept in alike):
            return
        for kept in alike:
            kept.go("dropped")
        self.all = [kept for kept in self.all if kept.truths != new.truths] + [new]

    def expected(self, truths: Sequence[Truth], had: int = 0) -> tuple[int, int]:
        """What a request with these truths can find when it has its first `had` blocks: (whole blocks, tokens of the one after them).

        All but its last token at most.
        """
        limit, whole = len(truths) - 1, had
        while (whole + 1) * BLOCK <= limit and any(kept.truths == tuple(truths[:(whole + 1) * BLOCK]) for kept in self.present):
            whole += 1
        beginnings = [min(kept.agrees(truths), limit - whole * BLOCK) for kept in self.present if kept.first == whole * BLOCK < limit]
        return whole, max(beginnings, default=0)

    def explains(self, use: CacheUse, model: Model, truths: Sequence[Truth]) -> bool:
        """Whether every block that `use` says was missed is one, there are no others, and the reason of each is true."""
        limit, at, known = len(model.ids) - 1, use.hit_tokens, True
        for run in use.missed:
            if run.token != at or run.blocks < 1:
                return False
            for _ in range(run.blocks):
                if at >= limit or run.kind not in self.kinds(model, truths, at, at == use.hit_tokens, known):
                    return False
                if not self._true(run, model, truths, at):
                    return False
                known = known and self._once_known(model.ids, at)
                at = (at // BLOCK + 1) * BLOCK
        told = sum(run.blocks for run in use.missed)
        missed = len(range(use.hit_tokens // BLOCK * BLOCK, limit, BLOCK)) if use.hit_tokens < limit else 0
        return use.missed_blocks == missed and (told == missed or len(use.missed) == 8)

    def kinds(self, model: Model, truths: Sequence[Truth], at: int, first: bool, known: bool) -> set[str]:
        """The reasons that the block with the token `at`, its first one that is not there, may have. `known`: all before it was once kept,
        under whatever mix. `first`: no block before it is missing."""
        if first and self._beginning(truths, at):
            return {"no room"}
        same = self._same(model.ids, at) if known else []
        exactly = [kept for kept in same if kept.truths[at] == truths[at]]
        if exactly:
            return {kept.gone or "behind a gap" for kept in exactly}
        if not same:
            return {"new tokens"}
        mixes = {"mix differs", "content changed"} if any(kept.root == model.root for kept in same) else set()
        goes_on = not first and any(kept.root != model.root for kept in same)  # what told of the block before tells of this one too
        return mixes | {"positions differ"} if goes_on or not mixes else mixes

    def _same(self, ids: Sequence[int], at: int) -> list[Kept]:
        """What is known of the block with the token `at` by the tokens alone: all those of the block, or all that it had of them."""
        start, end = at // BLOCK * BLOCK, at // BLOCK * BLOCK + BLOCK
        wanted = tuple(ids[:end] if end <= len(ids) else ids[:-1])
        return [kept for kept in self.all if kept.gone != "dropped" and kept.first == start and len(kept.ids) > at
                and kept.ids[:len(wanted)] == wanted[:len(kept.ids)]]

    def _beginning(self, truths: Sequence[Truth], at: int) -> bool:
        """Whether something that is there begins as the block with the token `at` goes on."""
        return any(kept.first == at // BLOCK * BLOCK and kept.agrees(truths) > at - kept.first for kept in self.present)

    def _once_known(self, ids: Sequence[int], at: int) -> bool:
        end = at // BLOCK * BLOCK + BLOCK
        return any(kept.gone != "dropped" and kept.ids == tuple(ids[:end]) for kept in self.all)

    def _true(self, run: MissedRun, model: Model, truths: Sequence[Truth], at: int) -> bool:
        """Whether the reason tells what the naive memory knows of the block with the token `at`."""
        same = self._same(model.ids, at)
        if run.kind in ("evicted", "cleared"):
            return any(kept.gone == run.kind and kept.because in run.detail for kept in same if kept.truths[at] == truths[at])
        if run.kind in ("mix differs", "content changed"):
            others = [kept for kept in same if kept.root == model.root and kept.truths[at] != truths[at]]
            return any(_tells(run, *_first_difference(kept.acting, model.acting())) for kept in others)
        return True

    def wrong_by_name(self, model: Model, truths: Sequence[Truth], whole: int) -> int:
        """Tokens behind the first `whole` blocks that a cache which knows adapters by name alone would take though computed otherwise."""
        wrong, names = 0, [_names(acting) for acting in model.acting()]
        while (end := (whole + 1) * BLOCK) <= len(model.ids) - 1:
            alike = [kept for kept in self.present if kept.root == model.root and kept.ids == tuple(model.ids[:end])
                     and [*map(_names, kept.acting)] == names[:end]]
            if not alike:
                break
            wrong += 0 if any(kept.truths == tuple(truths[:end]) for kept in alike) else BLOCK
            whole += 1
        return wrong


def _names(acting: Sequence[Acting]) -> list[str]:
    return sorted(use.name for use in acting)


def _first_difference(then: Sequence[Mixed], now: Sequence[Mixed]) -> tuple[Mixed, Mixed]:
    counted = [[[(use.digest, use.scale) for use in acting] for acting in which] for which in (then, now)]
    at = next(i for i, (a, b) in enumerate(zip(*counted, strict=False)) if a != b)
    return then[at], now[at]


def _tells(run: MissedRun, then: Mixed, now: Mixed) -> bool:
    """Whether the detail names each adapter that acts otherwise (more than three are not all told), and how."""
    left = [old for old in then if not any((old.digest, old.scale) == (new.digest, new.scale) for new in now)]
    come = [new for new in now if not any((old.digest, old.scale) == (new.digest, new.scale) for old in then)]
    changed = any(old.name == new.name and old.digest != new.digest for old in left for new in come)
    if run.kind == "content changed":
        return changed
    if not left and not come:
        return "order" in run.detail
    rescaled = [(old, new) for old in left for new in come if old.digest == new.digest]
    words = [f"{new.name} x {old.scale:g} then, x {new.scale:g} now" for old, new in rescaled]
    words += [f"{old.name} acted then, not now" for old in left if not any(old is pair[0] for pair in rescaled)]
    words += [f"{new.name} acts now, not then" for new in come if not any(new is pair[1] for pair in rescaled)]
    return len(words) > 3 or all(word in run.detail for word in words)

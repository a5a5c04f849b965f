"""A KV memory over cells that hold what they were truly computed with, so that a wrong reuse is seen."""
from __future__ import annotations

import random
from collections.abc import Sequence

from lora_bench.engine.blocks import BLOCK_TOKENS
from lora_bench.engine.kv_memory import KvMemory
from lora_bench.engine.protocol import CacheUse
from lora_bench.engine.stretches import Acting, Stretch

BASE = (Stretch(0),)


def acting(name: str, scale: float = 1.0, digest: str = "") -> Acting:
    return Acting(name, digest or f"digest of {name}", scale)


def under(*uses: Acting, start: int = 0) -> tuple[Stretch, ...]:
    """`uses` act from token `start` on."""
    return (Stretch(0), Stretch(start, uses)) if start else (Stretch(0, uses),)


PIRATE, JSON = acting("pirate", 0.7), acting("json")


def tokens(count: int, seed: int = 0) -> list[int]:
    """As many ids, the same for the same seed; more of them begin with fewer."""
    return [random.Random(f"{seed} {i}").randrange(50_000) for i in range(count)]


def kinds(use: CacheUse) -> list[str]:
    return [run.kind for run in use.missed]


class KvBench:
    """The truth of a token: all that its keys and values depend on. `now` is the clock."""

    def __init__(self, blocks: int) -> None:
        self.now, self.events, self.copies = 100.0, [], []
        self.cells: list[object] = [None] * (blocks * BLOCK_TOKENS)
        self.memory = KvMemory(blocks, self._copy, self.events.append, lambda: self.now)
        self.roots: dict[int, bytes] = {}

    def begin(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch] = BASE, root: bytes = b"") -> CacheUse:
        """Begin, and check what was found."""
        self.roots[user] = root
        use = self.memory.begin(user, ids, stretches, root)
        assert use.hit_tokens == self.memory.stored(user) <= max(len(ids) - 1, 0)
        assert use.hit_tokens == use.hit_blocks * BLOCK_TOKENS + use.copied_tokens
        self.check(user, ids, stretches)
        return use

    def compute(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch] = BASE, to: int = -1) -> bool:
        """Compute the tokens up to `to`, all by default, as a step does. False when the memory is full."""
        to = len(ids) if to < 0 else to
        if not self.memory.reserve(user, to):
            return False
        table, truths = self.memory.table_of(user), self.truths(user, ids, stretches)
        for position in range(self.memory.stored(user), to):
            self.cells[table.cell(position)] = truths[position]
        self.memory.commit(user, ids, stretches, to)
        self.check(user, ids, stretches)
        return True

    def run(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch] = BASE) -> CacheUse:
        """A whole request, ended."""
        use = self.begin(user, ids, stretches)
        assert self.compute(user, ids, stretches)
        self.memory.end(user)
        return use

    def check(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch]) -> None:
        table = self.memory.table_of(user)
        for position, truth in enumerate(self.truths(user, ids, stretches)[: self.memory.stored(user)]):
            assert self.cells[table.cell(position)] == truth, f"token {position} of request {user}"

    def truths(self, user: int, ids: Sequence[int], stretches: Sequence[Stretch]) -> list[object]:
        """Of every token."""
        acts: list[tuple[tuple[str, float], ...]] = []
        for token in range(len(ids)):
            now = [stretch.acting for stretch in stretches if stretch.start <= token]
            acts.append(tuple((each.digest, each.scale) for each in now[-1]) if now else ())
        return [(self.roots[user], tuple(ids[: end + 1]), tuple(acts[: end + 1])) for end in range(len(ids))]

    def _copy(self, source: int, target: int, cells: int) -> None:
        self.copies.append((source, target, cells))
        a, b = source * BLOCK_TOKENS, target * BLOCK_TOKENS
        assert None not in self.cells[a : a + cells], "copied from what was never computed"
        self.cells[b : b + cells] = self.cells[a : a + cells]

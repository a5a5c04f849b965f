"""What KV blocks hold: found by key, and by tokens alone so that a miss can be explained."""
from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from .kv_keys import ID_BYTES, History, same_beginning

FORGOTTEN = 8192
"""descriptions of blocks that are gone which are kept to explain misses: 131,072 tokens' worth, some 6 MB"""
ALIKE = 64
"""blocks with the same beginning, the latest ones, that are looked at for one to copy from or to explain a miss: some 0.1 ms"""


@dataclass(frozen=True, slots=True)
class Gone:
    """Why a block is no longer there; `because` ends the sentence, `when` is of the memory's clock."""

    kind: Literal["evicted", "cleared"]
    when: float
    because: str


@dataclass(slots=True, eq=False)
class Filled:
    """What a block holds, or held: whole blocks, and the last one of a request that ended within it."""

    parent: bytes
    """token key of the block before"""
    ids: bytes
    """packed, 1 to 16 of them"""
    history: History
    """of all tokens up to the last one"""
    key: bytes
    """its own token key"""
    user: int
    """who computed it"""
    block: int
    gone: Gone | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids) // ID_BYTES

    def agrees(self, ids: bytes, before: int, history: History) -> int:
        """How many of its first tokens are `ids` with all that acted on them and on the `before` tokens before it as in `history`."""
        count = same_beginning(self.ids, ids)
        while count and self.history.at(before + count).key != history.at(before + count).key:
            count -= 1
        return count


class KvIndex:
    """At most one block for a key: the first of equal ones."""

    def __init__(self) -> None:
        self._found: dict[bytes, Filled] = {}
        self._of_block: dict[int, Filled] = {}
        self._alike: dict[bytes, list[Filled]] = {}
        """token key of the block before + first id -> what follows there, gone or not, the latest last"""
        self._forgotten: OrderedDict[bytes, Filled] = OrderedDict()
        self._named: Counter[bytes] = Counter()
        """token key + names of the adapters -> findable blocks that have these"""

    def find(self, key: bytes, history: History) -> Filled | None:
        return self._found.get(key + history.key)

    def remembered(self, key: bytes, history: History) -> Filled | None:
        """The block with this key, gone or not."""
        whole = key + history.key
        return self._found.get(whole) or self._forgotten.get(whole)

    def has_named(self, key: bytes, history: History) -> bool:
        """Whether a block can be found that has these tokens and on which adapters of the same names acted, whatever their content and
        scale."""
        return key + history.names in self._named

    def of(self, block: int) -> Filled | None:
        """What can be found in `block`; None when it is not findable."""
        return self._of_block.get(block)

    def blocks(self) -> Iterable[tuple[int, Filled]]:
        """Every findable block and what it holds."""
        return self._of_block.items()

    def add(self, block: int, parent: bytes, ids: bytes, history: History, user: int, key: bytes) -> None:
        """Make `block` findable; nothing changes when its key is there already."""
        whole = key + history.key
        if whole in self._found:
            return
        before = self._forgotten.pop(whole, None)
        if before is not None:
            self._remove_alike(before)
        filled = Filled(parent, ids, history, key, user, block)
        self._found[whole] = self._of_block[block] = filled
        self._named[key + history.names] += 1
        self._alike.setdefault(parent + ids[:ID_BYTES], []).append(filled)

    def move(self, filled: Filled, block: int) -> None:
        """Its content lies in `block` now."""
        del self._of_block[filled.block]
        filled.block = block
        self._of_block[block] = filled

    def remove(self, block: int, gone: Gone | None) -> None:
        """It can be found no more. Why is remembered for a while, unless `gone` is None."""
        filled = self._of_block.pop(block)
        whole = filled.key + filled.history.key
        del self._found[whole]
        self._unname(filled.key + filled.history.names)
        if gone is None:
            self._remove_alike(filled)
            return
        filled.block, filled.gone = -1, gone
        self._forgotten[whole] = filled
        if len(self._forgotten) > FORGOTTEN:
            self._remove_alike(self._forgotten.popitem(last=False)[1])

    def alike(self, parent: bytes, ids: bytes) -> Iterator[Filled]:
        """What follows the tokens of `parent` and begins with the first of `ids`, under whatever mix, gone or not; the latest first."""
        return islice(reversed(self._alike.get(parent + ids[:ID_BYTES], ())), ALIKE)

    def _unname(self, named: bytes) -> None:
        self._named[named] -= 1
        if not self._named[named]:
            del self._named[named]

    def _remove_alike(self, filled: Filled) -> None:
        place = filled.parent + filled.ids[:ID_BYTES]
        self._alike[place].remove(filled)
        if not self._alike[place]:
            del self._alike[place]

"""How prompts share the tokens of a step."""
from __future__ import annotations

from collections.abc import Sequence

from .blocks import BLOCK_TOKENS


def shares(asked: Sequence[tuple[int, int]], budget: int) -> list[int]:
    """Tokens for each of `asked`, (tokens stored, tokens wanted), of `budget` >= 1 tokens in all.

    Semantics: evenly; what one does not need goes to the others; who does not get all it wants ends at the border of a block. The first
    get theirs first where there are fewer blocks than prompts. The first always gets something.
    """
    got = [0] * len(asked)
    unserved = list(range(len(asked)))
    while unserved and budget >= BLOCK_TOKENS:
        each = max(budget // len(unserved), BLOCK_TOKENS)
        for i in unserved:
            stored, wanted = asked[i]
            more = _to_border(stored + got[i], wanted - got[i], min(each, budget))
            got[i] += more
            budget -= more
        unserved = [i for i in unserved if got[i] < asked[i][1]]
    if asked and not any(got):
        got[0] = min(asked[0][1], budget)
    return got


def _to_border(stored: int, wanted: int, most: int) -> int:
    """Up to `most` of the wanted tokens, so many that the last of several chunks ends with its block."""
    if wanted <= most:
        return wanted
    return max((stored + most) // BLOCK_TOKENS * BLOCK_TOKENS - stored, 0)

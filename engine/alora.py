"""Where an activated LoRA (aLoRA) starts: the last exact occurrence of its invocation tokens in the prompt."""
from __future__ import annotations

from collections.abc import Callable, Sequence

SHOWN = 16
"""token ids of one list in a message"""


def find_last(ids: Sequence[int], invocation: Sequence[int]) -> int:
    """Index of the first token of the last exact occurrence of `invocation` in `ids`; -1 when there is none or it is empty."""
    size = len(invocation)
    if size == 0:
        return -1
    wanted, first = list(invocation), invocation[0]
    for start in range(len(ids) - size, -1, -1):
        if ids[start] == first and list(ids[start:start + size]) == wanted:
            return start
    return -1


def find_written(ids: Sequence[int], invocation: Sequence[int], prompt_tokens: int) -> int:
    """Index of the first token of the first occurrence of `invocation` (not empty) that ends behind the prompt; -1 when there is none.

    It is where a reply that is looked at token by token has it first; its beginning may stand in the prompt.
    """
    size, wanted = len(invocation), list(invocation)
    first = max(prompt_tokens + 1 - size, 0)
    return next((start for start in range(first, len(ids) - size + 1) if list(ids[start:start + size]) == wanted), -1)


def nearest_miss(ids: Sequence[int], invocation: Sequence[int], text: Callable[[Sequence[int]], str]) -> str:
    """One clause on why `invocation` was not found: the text is there but tokenised otherwise, or how much of it is there."""
    ids, invocation = list(ids), list(invocation)
    wanted = text(invocation)
    other = _same_text(ids, wanted, text)
    if other:
        return f"tokenised as {_cut(other)} here, expected {_cut(invocation)}"
    start = _longest_beginning(ids, invocation)
    if start < 0:
        return f"the prompt has none of {_cut(invocation)}"
    return f"nearest is {_cut(ids[start:start + len(invocation)])} at token {start}, expected {_cut(invocation)}"


def _longest_beginning(ids: Sequence[int], invocation: Sequence[int]) -> int:
    """Where the most of the beginning of `invocation` stands, the last of such places; -1 when nowhere."""
    best, longest = -1, 0
    for start in range(len(ids) - 1, -1, -1):
        if ids[start] != invocation[0] or ids[start:start + longest + 1] != invocation[:longest + 1]:
            continue
        size = next((i for i, (a, b) in enumerate(zip(ids[start:], invocation, strict=False)) if a != b),
                    min(len(ids) - start, len(invocation)))
        best, longest = start, size
    return best


def _cut(ids: Sequence[int]) -> str:
    """Token ids for a message."""
    return str(list(ids)) if len(ids) <= SHOWN else f"[{', '.join(map(str, ids[:SHOWN]))}, … {len(ids)} tokens]"


def _same_text(ids: Sequence[int], wanted: str, text: Callable[[Sequence[int]], str]) -> Sequence[int]:
    """The shortest run of tokens, in the last occurrence, whose text holds `wanted`; empty when the text is not there."""
    if not wanted or wanted not in text(ids):
        return ()
    low, high = 0, len(ids)
    while high - low > 1:  # the largest start whose tail still holds the text
        middle = (low + high) // 2
        low, high = (middle, high) if wanted in text(ids[middle:]) else (low, middle)
    end = next((end for end in range(low + 1, len(ids) + 1) if wanted in text(ids[low:end])), low)
    return ids[low:end]

"""Where an invocation starts, against brute force, and what is said when it is not there."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lora_bench.engine.alora import find_last, nearest_miss

ids = st.lists(st.integers(0, 2), max_size=12)


@given(ids, st.lists(st.integers(0, 2), max_size=4))
def test_find_last_is_the_last_exact_occurrence(prompt: list[int], invocation: list[int]) -> None:
    starts = [i for i in range(len(prompt)) if invocation and prompt[i:i + len(invocation)] == invocation]
    assert find_last(prompt, invocation) == max(starts, default=-1)


SMALL_INVOCATIONS = ((1,), (1, 2), (1, 1, 2), (1, 2, 1), (1, 2, 1, 2))
"""with every prompt of six of the ids 1, 2 and 9: 3,645 cases"""


def _scan_that_starts_over(prompt: Sequence[int], invocation: Sequence[int]) -> int:
    """From the end, without a second look at the token at which a match broke: misses matches that overlap a broken one."""
    left = len(invocation)
    for at in range(len(prompt) - 1, -1, -1):
        left = left - 1 if prompt[at] == invocation[left - 1] else len(invocation)
        if left == 0:
            return at
    return -1


def test_every_small_case_is_right_also_those_that_a_simpler_scan_misses() -> None:
    cases = missed = too_early = 0
    for prompt, invocation in product(product((1, 2, 9), repeat=6), SMALL_INVOCATIONS):
        right = max((at for at in range(6) if prompt[at:at + len(invocation)] == invocation), default=-1)
        assert find_last(prompt, invocation) == right, (prompt, invocation)
        simpler = _scan_that_starts_over(prompt, invocation)
        cases, missed, too_early = cases + 1, missed + (simpler < 0 <= right), too_early + (0 <= simpler < right)
    assert (cases, missed, too_early) == (3645, 122, 8)


def test_overlapping_occurrences() -> None:
    assert find_last([1, 1, 1], [1, 1]) == 1
    assert find_last([9, 1, 2, 2], [1, 2]) == 1
    assert find_last((1, 2), [1, 2, 3]) == -1


def _text(tokens: Sequence[int]) -> str:
    """Tokens 1 = "a", 2 = "b", 3 = "ab", others a dot."""
    return "".join({1: "a", 2: "b", 3: "ab"}.get(token, ".") for token in tokens)


def test_miss_names_the_tokens_that_spell_the_same() -> None:
    assert nearest_miss([7, 3, 7, 1, 2, 7], [3], _text) == "tokenised as [1, 2] here, expected [3]"
    assert nearest_miss([7, 3, 7], [1, 2], _text) == "tokenised as [3] here, expected [1, 2]"


def test_miss_names_the_longest_start_that_is_there() -> None:
    assert nearest_miss([5, 6, 8, 5, 9], [5, 6, 7], str) == "nearest is [5, 6, 8] at token 0, expected [5, 6, 7]"
    assert nearest_miss([8, 8], [5, 6], str) == "the prompt has none of [5, 6]"


@given(ids, st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_a_miss_is_at_the_last_of_the_longest_beginnings(prompt: list[int], invocation: list[int]) -> None:
    starts = [find_last(prompt, invocation[:size]) for size in range(1, len(invocation))]
    if find_last(prompt, invocation) < 0 and max(starts, default=-1) >= 0:
        start = next(start for start in reversed(starts) if start >= 0)
        assert f" at token {start}, expected" in nearest_miss(prompt, invocation, lambda ids: "?" * len(ids) if ids == invocation else "")


def test_long_invocations_are_cut_in_messages() -> None:
    assert nearest_miss([5] * 40, [5] * 40 + [6], lambda _: "").count("5") < 60


@given(ids, st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_a_miss_always_has_a_clause(prompt: list[int], invocation: list[int]) -> None:
    if find_last(prompt, invocation) < 0:
        assert nearest_miss(prompt, invocation, _text)

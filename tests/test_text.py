"""The cleaning of untrusted text: nothing that a terminal acts on gets through, and nothing else is lost."""
from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_bench.workbench.text import clean, clean_line, size_text

BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=80)


def acts(char: str) -> bool:
    """Whether a terminal may act on the character instead of showing it."""
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in BIDI


@given(ANY_TEXT)
def test_nothing_that_acts_gets_through(text: str) -> None:
    assert not [char for char in clean(text) if acts(char) and char not in "\n\t"]
    assert not [char for char in clean_line(text, 40) if acts(char)]
    clean(text).encode()  # what is left can be written to a terminal: no lone surrogates


@given(ANY_TEXT, ANY_TEXT)
def test_a_sequence_split_over_two_tokens_is_cleaned_the_same(a: str, b: str) -> None:
    assert clean(a) + clean(b) == clean(a + b)


@given(ANY_TEXT, st.integers(1, 60))
def test_a_line_keeps_its_limit(text: str, limit: int) -> None:
    assert len(clean_line(text, limit)) <= limit


@pytest.mark.parametrize("plain", ["naïve café", "日本語 😀 👩‍👩‍👧", "a\tb\nc", "[/x] {y} $z &amp;", "┼●▰"])
def test_ordinary_text_is_untouched(plain: str) -> None:
    assert clean(plain) == plain


def test_an_escape_is_seen_not_sent() -> None:
    assert clean("\x1b]2;title\x07") == "␛]2;title␇"
    assert clean_line("a\nb\rc") == "a⏎b␍c"
    assert clean_line("abcdef", 4) == "abc…"


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (3_800_000, "3.6 MiB"), (98_362_432, "93.8 MiB"),
                                             (538_060_032, "513 MiB"), (1 << 30, "1.0 GiB")])
def test_sizes(count: int, text: str) -> None:
    assert size_text(count) == text

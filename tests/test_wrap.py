"""Text in lines by columns."""
from __future__ import annotations

import random
import textwrap

import pytest
from rich.cells import cell_len

from lora_bench.workbench.wrap import wrap


def test_lines_break_at_blanks_and_long_words_at_the_end() -> None:
    assert wrap("one two three", 8, "- ", "  ") == ["- one", "  two", "  three"]
    assert wrap("at " + "y" * 12, 8, "! ", "  ") == ["! at yyy", "  yyyyyy", "  yyy"]
    assert wrap("日本語 日本語日本語", 7) == ["日本語", "日本語", "日本語"]
    assert wrap("one two", 2, "a long label: ", "    ") == ["a long label: on", "    e", "    tw", "    o"]
    assert wrap("", 8, "- ") == ["- "] and wrap("   ", 8) == [""]


@pytest.mark.parametrize("seed", [random.randrange(2**32) for _ in range(3)])
def test_nothing_is_lost_and_no_line_is_too_wide(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        text = "".join(draw.choice("ab 日 -") for _ in range(draw.randrange(60)))
        width, first, rest = draw.randrange(4, 30), draw.choice(["", "! "]), draw.choice(["", "  "])
        lines = wrap(text, width, first, rest)
        assert all(cell_len(line) <= width for line in lines), (seed, text, width, lines)
        assert "".join("".join(lines).split()) == "".join((first + text).split()), (seed, text)


def test_narrow_words_break_as_in_the_standard_library() -> None:
    text = "The quick brown fox jumps over the lazy dog and goes home again"
    for width in range(8, 40):
        assert wrap(text, width, "> ", "  ") == textwrap.wrap(text, width, initial_indent="> ", subsequent_indent="  ")

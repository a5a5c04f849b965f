"""The tables in README and docs say what the code does."""
from __future__ import annotations

from make_tables import FIELDS, README, TOKENIZERS, fields_page, with_table

from lora_bench.engine.tokenizer.gguf import MODELS


def test_the_tables_are_up_to_date() -> None:
    remedy = "run: python tests/make_tables.py"
    assert README.read_text() == with_table(README.read_text()), remedy
    assert FIELDS.read_text() == fields_page(), remedy
    assert TOKENIZERS.keys() == MODELS.keys()

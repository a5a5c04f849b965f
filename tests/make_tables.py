"""The tables of what is read, made from the code's own: `python tests/make_tables.py` writes them into README.md and docs/."""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lora_bench.engine.adapters.fields import field_table
from lora_bench.engine.adapters.open import CONTAINERS
from lora_bench.engine.models import ARCHITECTURES_CONFIG, ARCHITECTURES_GGUF, WRAPPED
from lora_bench.engine.models.rope_facts import CONFIG_KINDS
from lora_bench.engine.tokenizer.gguf import MODELS
from lora_bench.engine.tokenizer.pre import PRE_TOKENIZERS
from lora_bench.kernels.quant import QUANT_TYPES

ROOT = Path(__file__).parents[1]
README, FIELDS = ROOT / "README.md", ROOT / "docs" / "adapter-fields.md"
BEGIN = "<!-- made by tests/make_tables.py: what we load -->\n"
END = "<!-- end of what we load -->\n"
TOKENIZERS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE", "t5": "unigram"}
"""tokenizer.ggml.model in words"""


def load_table() -> str:
    """What we load, as Markdown."""
    plain = [name for name, kind in QUANT_TYPES.items() if kind.block_elements == 1]
    packed = [name for name in QUANT_TYPES if name not in plain]
    verdicts = [verdict for _, verdict, _ in field_table()]
    counts = ", ".join(f"{verdicts.count(verdict)} {words}" for verdict, words in (
        ("honoured", "honoured"), ("irrelevant", "without meaning once an adapter is trained"), ("refused", "refused unless neutral")))
    rows = [
        ("base models", "GGUF, versions 2 and 3, either byte order, one file or split; Hugging Face folders and cache entries with "
                        "safetensors weights, one file or shards"),
        ("architectures, GGUF", _codes(ARCHITECTURES_GGUF)),
        ("architectures, folders", f"{_codes(ARCHITECTURES_CONFIG)}; the language model inside {_codes(WRAPPED)}"),
        ("RoPE scaling", f"{_codes(CONFIG_KINDS)}; `dynamic` acts beyond the trained context only, where contexts end here"),
        ("weights", f"{', '.join(plain)}; in a GGUF also {', '.join(packed)}"),
        ("tokenizers", "`tokenizer.json`, else SentencePiece's `tokenizer.model`, else `vocab.json` with `merges.txt`; in a GGUF "
         + ", ".join(f"`{name}` ({TOKENIZERS[name]})" for name in MODELS)),
        ("pre-tokenizers, GGUF", _codes(PRE_TOKENIZERS)),
        *((f"adapters: {name}", what) for name, what in CONTAINERS.items()),
        ("fields of an adapter's config", f"{counts}; [each with its reason]({FIELDS.relative_to(ROOT)})"),
    ]
    return _table(("what", "which"), rows)


def fields_page() -> str:
    """Every field of PEFT's LoraConfig and what is made of it."""
    intro = ("# Fields of an adapter's config\n\nEvery field of PEFT's `LoraConfig` (`adapter_config.json`). **honoured**: read and "
             "obeyed. **irrelevant**: has no meaning once\nthe adapter is trained. **refused**: an adapter that sets it is not loaded, "
             "and the message says why; off, it is no obstacle.\nA field that is not listed here is refused unless it is null, false or "
             "empty. `lora-bench check` gives the verdicts for one adapter.\n\nMade by `python tests/make_tables.py` from "
             "`engine/adapters/fields.py`.\n\n")
    return intro + _table(("field", "verdict", "how, or why"), ((f"`{name}`", verdict, reason) for name, verdict, reason in field_table()))


def with_table(readme: str) -> str:
    """README's text with the table between its markers. Raises ValueError when they are not there."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + load_table() + END + after


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
    FIELDS.write_text(fields_page())

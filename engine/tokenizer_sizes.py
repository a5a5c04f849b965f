"""How much text the tokens of a tokenizer may hold: the library makes automata of it before anybody could look at them. No tokenizers.

An added token takes some 80 bytes a byte, a piece of a unigram vocabulary over 300.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable

from .weights.files import FormatError

MAX_ADDED = 300_000
MAX_ADDED_CHARACTERS = 512
"""of one added token; names are at 10 to 40"""
MAX_ADDED_BYTES = 2 << 20
"""of all of them; the most in use have 100,000"""
MAX_PIECE_BYTES = 4 << 20
"""of a SentencePiece vocabulary; 250,000 pieces of all languages have 2,300,000"""


def check_added(texts: Collection[str], where: object) -> None:
    """Raises FormatError for more added tokens, or longer ones, than are taken."""
    if len(texts) > MAX_ADDED:
        raise FormatError(f"{where}: adds {len(texts):,} tokens, more than the {MAX_ADDED:,} that are accepted")
    longest = max(map(len, texts), default=0)
    if longest > MAX_ADDED_CHARACTERS:
        raise FormatError(f"{where}: has an added token of {longest:,} characters, more than the {MAX_ADDED_CHARACTERS} that are accepted")
    _check_bytes(texts, MAX_ADDED_BYTES, "added tokens", where)


def check_pieces(texts: Iterable[str], where: object) -> None:
    """Raises FormatError for a SentencePiece vocabulary of more text than is taken."""
    _check_bytes(texts, MAX_PIECE_BYTES, "pieces", where)


def _check_bytes(texts: Iterable[str], limit: int, what: str, where: object) -> None:
    total = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if total > limit:
        raise FormatError(f"{where}: its {what} hold {total:,} bytes, more than the {limit:,} that are accepted")

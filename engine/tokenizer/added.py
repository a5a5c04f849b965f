"""What the tokenizer in an adapter's folder adds to the base's, and where it contradicts it."""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base_parts import TURN_END_TEXTS
from ..tokenizer_folder import ANY_ID, AddedTokens, added_tokens, chat_template, rowless_note, token_texts, tokenizer_settings
from ..tokenizer_older import listed_tokens
from ..weights.files import FormatError, present, read_json_object, show
from .sentence_piece import SPACE
from .tokenizer import Tokenizer

_PLACEHOLDER = re.compile(
    r"\[PAD\d+\]|<unused\d+>|<\|?(?:reserved|extra|unused|dummy|placeholder|fim_pad)[\w ]*\|?>|\[(?:unused|control)_?\d+\]", re.IGNORECASE)
"""tokens that a base keeps free; adapters may give them a meaning"""
_SHOWN = 5


@dataclass(frozen=True)
class AddedVocabulary:
    """What an adapter brings for the text of its requests. Nothing of it is applied unless asked for."""

    tokens: AddedTokens = field(default_factory=dict)
    """spelling -> (id, special) of the tokens that the base has not: on new rows of the embedding or on rows kept free"""
    end_tokens: tuple[int, ...] = ()
    """ids that end a reply beside those of the base"""
    special_texts: Mapping[str, str] = field(default_factory=dict)
    """bos_token, eos_token, ... as the adapter's files name them"""
    chat_template: str | None = None
    rowless: tuple[str, ...] = ()
    """tokens of the adapter's tokenizer without a row in the embedding (often a padding token): they stay text"""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the person."""
        lines = []
        if self.tokens:
            names = [f"{show(text)} ({number})" for text, (number, _) in list(self.tokens.items())[:_SHOWN]]
            more = f" and {len(self.tokens) - _SHOWN:,} more" if len(self.tokens) > _SHOWN else ""
            lines.append(f"adds {len(self.tokens):,} token{'s'[:len(self.tokens) != 1]}: {', '.join(names)}{more}")
        return (*lines, note) if (note := rowless_note(self.rowless)) else tuple(lines)

    def applied_to(self, base: Tokenizer) -> Tokenizer:
        """The base's tokenizer with the added tokens; ids of all other text are as before."""
        return base.with_added(self.tokens, self.end_tokens, self.special_texts)


def read_added_vocabulary(folder: Path, base: Tokenizer, rows: int) -> AddedVocabulary:
    """`rows`: of the embedding that goes with the adapter: its own where it brings one, else the base's.

    Raises FormatError naming the file and the token where an id means another text than in the base: such an adapter was
    trained with another tokenizer. OSError.
    """
    settings = tokenizer_settings(folder)
    path = folder / "tokenizer.json"
    if present(path):
        known = read_json_object(path)
        declared = added_tokens(known, path, ANY_ID)
        _check_vocabulary(known, declared, base, path)
    else:
        path, listed = listed_tokens(folder, settings)
        declared = {token["content"]: (number, token.get("special") is True) for number, token in listed.items()}
    new = {text: entry for text, entry in declared.items() if text and _is_new(text, entry[0], base, path)}
    tokens = {text: entry for text, entry in new.items() if entry[0] < rows}
    texts = token_texts(settings)
    eos = texts.get("eos_token", "")
    ends = {number for text, (number, special) in tokens.items() if special and text in TURN_END_TEXTS}
    ends |= {tokens[eos][0] if eos in tokens else base.id_of(eos)} - {None}
    return AddedVocabulary(
        tokens=tokens, end_tokens=tuple(sorted(ends - set(base.end_tokens))), special_texts=texts, chat_template=chat_template(folder),
        rowless=tuple(text for text in new if text not in tokens),
    )


def _check_vocabulary(known: dict[str, Any], declared: AddedTokens, base: Tokenizer, path: Path) -> None:
    for text, number in _vocabulary(known):
        if text not in declared and _is_new(text, number, base, path):
            raise FormatError(f"{path}: its vocabulary has the token {show(text)} ({number:,}) that the base has not, and not as an added "
                              "token; text would be cut in another way than the base cuts it, "
                              "so the adapter cannot be used with this base")


def _vocabulary(known: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The vocabulary of the model in a tokenizer.json; unigram models list it in the order of ids."""
    model = known.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from ((text, number) for text, number in vocab.items() if type(number) is int)
    elif isinstance(vocab, list):
        yield from ((entry[0], i) for i, entry in enumerate(vocab) if isinstance(entry, list) and entry and isinstance(entry[0], str))


def _is_new(text: str, number: int, base: Tokenizer, path: Path) -> bool:
    """Whether the base lacks the token. Raises FormatError where the base's token of this id, or the id of this text, is another."""
    there = base.spelling(number)
    if there is not None and _plain(there) == _plain(text):
        return False
    if there is not None and not _PLACEHOLDER.fullmatch(there):
        raise FormatError(f"{path}: the token {number:,} is {show(text)} here and {show(there)} in the base; "
                          "the adapter was trained with another tokenizer, use the base that it was made for")
    elsewhere = base.id_of(text)
    if elsewhere is not None and elsewhere != number:
        raise FormatError(f"{path}: the token {show(text)} is {number:,} here and {elsewhere:,} in the base; "
                          "the adapter was trained with another tokenizer, use the base that it was made for")
    return True


def _plain(text: str) -> str:
    """GGUF spells runs of spaces with spaces, tokenizer.json with U+2581."""
    return text.replace(SPACE, " ")

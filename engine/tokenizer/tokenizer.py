"""Token ids <-> text, whole and as a stream."""
from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from ..base_parts import TURN_MARKS, BaseFile, TokenizerSource
from ..weights.files import FormatError, read_bounded, show
from . import gguf
from .bounds import check_bounds
from .guarded import library
from .specials import SpecialTokens
from .token_bytes import decoding_of

MAX_TOKENIZER_BYTES = 64 << 20
_CANNOT = "the tokenizer cannot be built; download the file again"


class Tokenizer:
    """The tokenizer of one base. Ids from 0 to `vocab_size` - 1; ids beyond (padding of the embedding) stand for no text."""

    def __init__(self, base: BaseFile) -> None:
        """Raises FormatError naming the file and what in it cannot be honoured."""
        source = base.tokenizer
        self.path = source.path or base.path
        """the file that messages name"""
        with library(self.path, _CANNOT):
            self._fast = _of_metadata(source, self.path) if source.metadata is not None else _of_file(source)
        self._fast.no_truncation()
        self._fast.no_padding()
        _without_dropout(self._fast)
        _mark_turns(self._fast, every=source.metadata is not None)
        check_bounds(self._fast, self.path)
        self.bos, self.eos = source.bos, source.eos
        self.end_tokens = base.end_tokens
        self.model_vocab = base.facts.vocab
        self.special_texts = dict(source.texts)
        """bos_token, eos_token, ... as chat templates name them"""
        self._moved: dict[int, int] = {}
        """id that the library gave an added token -> its id"""
        self._read_vocabulary(base)
        if source.more:
            self._add(source.more)
        self.add_bos = self._adds_bos(base) if source.add_bos is None else source.add_bos

    def _read_vocabulary(self, base: BaseFile) -> None:
        vocab = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if not 0 < self.vocab_size <= base.facts.vocab:
            raise FormatError(f"{self.path}: has token ids up to {self.vocab_size - 1:,}, the model's vocabulary holds "
                              f"{base.facts.vocab:,}; the tokenizer is of another model")
        self._texts: list[str | None] = [None] * self.vocab_size
        for text, number in vocab.items():
            self._texts[number] = text
        metadata = base.tokenizer.metadata
        if metadata is not None:
            tokens = metadata["tokenizer.ggml.tokens"]
            kinds = _kinds(base.tokenizer)
            self._texts = [None if gguf.is_filler(text, i, kinds[i]) else text for i, text in enumerate(tokens)]
            self.vocab_size = len(tokens)
        moved = next(((text, i) for text, i in base.tokenizer.added.items() if vocab.get(text) != i), None)
        if moved:
            raise FormatError(f"{self.path}: declares the added token {show(moved[0])} as id {moved[1]:,}, but ids are given in order and "
                              f"it becomes {vocab.get(moved[0])}; the tokenizer is incomplete or edited, download it again")
        self._read_added()
        self._decoding = decoding_of(self._fast, self.path)

    def _read_added(self) -> None:
        added = {self._moved.get(i, i): token for i, token in sorted(self._fast.get_added_tokens_decoder().items())}
        self._added = {number: token.content for number, token in added.items()}
        self.special = SpecialTokens({token.content: number for number, token in added.items() if token.special})
        """the tokens that are parsed only when asked for"""
        self.eats_space = {number: (token.lstrip, token.rstrip) for number, token in added.items() if token.special}
        """id of such a token -> whether it takes the white space before it, after it"""
        self._special_ids = frozenset(self.eats_space)
        self._bytes: dict[int, bytes] = {}
        """of tokens that were asked for"""

    def _adds_bos(self, base: BaseFile) -> bool:
        """What a file means that does not say whether plain text begins with BOS."""
        if base.tokenizer.metadata is not None:
            return gguf.adds_bos_by_default(base.tokenizer.metadata)
        with library(self.path, _CANNOT):
            plain = self._fast.encode("a", add_special_tokens=False).ids[:1]
            return self.bos is not None and self._fast.encode("a").ids[:1] == [self.bos] != plain

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of `text`, nothing added. `special`: special tokens spelled in it become those tokens; else they stay text.

        Raises FormatError when the tokenizer's own pattern fails on the text.
        """
        self._fast.encode_special_tokens = not special
        with library(self.path, "its tokenizer fails on this text"):
            ids = self._fast.encode(text.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False).ids
        return [self._moved.get(i, i) for i in ids] if self._moved else ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. `special`: special tokens are spelled out, else they give nothing."""
        return self.strip_first(b"".join(self.token_bytes(i, special) for i in ids)).decode("utf-8", errors="replace")

    def token_text(self, ids: Iterable[int]) -> list[str]:
        """Every token by itself, for display: special ones spelled out, parts of characters as U+FFFD, unknown ids as "<id>"."""
        return [self.token_bytes(i, True).decode("utf-8", errors="replace") if self._known(i) else f"<{i}>" for i in ids]

    def spelling(self, number: int) -> str | None:
        """The token as its vocabulary spells it; None for an id without token."""
        return self._added.get(number, self._texts[number]) if self._known(number) else None

    def token_bytes(self, number: int, special: bool) -> bytes:
        """The bytes that a token stands for; none for ids without token and, unless `special`, for special ones."""
        if number in self._special_ids and not special or not self._known(number):
            return b""
        if (data := self._bytes.get(number)) is None:
            added = self._added.get(number)
            data = self._bytes[number] = self._decoding.of(self._texts[number]) if added is None else self._decoding.of_added(added)
        return data

    def strip_first(self, data: bytes) -> bytes:
        """A text's bytes without the space that the decoder takes from its beginning."""
        return data[1:] if self._decoding.strips_space and data.startswith(b" ") else data

    def id_of(self, text: str) -> int | None:
        """The id of the token that the vocabulary spells so."""
        return self._moved.get(found, found) if (found := self._fast.token_to_id(text)) is not None else None

    def with_added(self, tokens: Mapping[str, tuple[int, bool]], end_tokens: Sequence[int] = (),
                   special_texts: Mapping[str, str] | None = None) -> Tokenizer:
        """This tokenizer with more tokens, spelling -> (id, special); itself when nothing is added.

        Ids of all other text stay; ids may leave gaps, and may be those of tokens that text can no longer mean.
        `end_tokens` end a reply too, `special_texts` take the place of the base's by name.
        """
        if not tokens and not end_tokens and not special_texts:
            return self
        other = copy(self)
        other.end_tokens = tuple(sorted({*self.end_tokens, *end_tokens}))
        other.special_texts = {**self.special_texts, **(special_texts or {})}
        if tokens:
            other._add(tokens)
        return other

    def _add(self, tokens: Mapping[str, tuple[int, bool]]) -> None:
        with library(self.path, "its tokens cannot be added to"):
            fast = Fast.from_str(self._fast.to_str())
            for wanted in (True, False):
                new = [AddedToken(text, normalized=False, special=special) for text, (_, special) in tokens.items() if special == wanted]
                fast.add_special_tokens(new) if wanted else fast.add_tokens(new)
        given = {text: fast.token_to_id(text) for text in tokens}
        taken = next((text for text, number in given.items() if self._known(number) and number != tokens[text][0]), None)
        if taken is not None:
            raise FormatError(f"{self.path}: the added token {show(taken)} cannot be told from token {given[taken]:,} of the base")
        check_bounds(fast, self.path)
        self._fast = fast
        self._moved = {**self._moved, **{number: tokens[text][0] for text, number in given.items()}}
        self.vocab_size = max(self.vocab_size, *(number + 1 for number, _ in tokens.values()))
        self.model_vocab = max(self.model_vocab, self.vocab_size)
        self._texts = self._texts + [None] * (self.vocab_size - len(self._texts))
        for text, (number, _) in tokens.items():
            self._texts[number] = text
        self._read_added()

    def _known(self, number: int) -> bool:
        return 0 <= number < self.vocab_size and self._texts[number] is not None


class TextStream:
    """A reply's text as its tokens come: `push` gives the text that is certain now, `finish` the rest.

    Characters come whole; all pieces joined equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        """may be changed for one that has more tokens, or fewer, between two of them"""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._started = False

    def push(self, token: int) -> str:
        data = self.tokenizer.token_bytes(token, False)
        if data and not self._started:
            self._started = True
            data = self.tokenizer.strip_first(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for the beginning of a character that never ended."""
        return self._decoder.decode(b"", final=True)


def _of_metadata(source: TokenizerSource, path: Path) -> Fast:
    return gguf.build(source.metadata, source.metadata["tokenizer.ggml.tokens"], _kinds(source), path, source.strips)


def _of_file(source: TokenizerSource) -> Fast:
    data = read_bounded(source.path, MAX_TOKENIZER_BYTES)
    if source.rowless:
        known = json.loads(data)
        known["added_tokens"] = [token for token in known["added_tokens"] if token["content"] not in source.rowless]
        data = json.dumps(known).encode()
    return Fast.from_buffer(data)


def _kinds(source: TokenizerSource) -> list[int]:
    return list(source.metadata.get("tokenizer.ggml.token_type") or [1] * len(source.metadata["tokenizer.ggml.tokens"]))


def _mark_turns(fast: Fast, every: bool) -> None:
    """Make the marks of turns special where a file has them as plain added tokens, so that those typed by people stay text.

    `every`: also those that are plain words of the vocabulary, as converters left them in some GGUF files.
    """
    added = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    plain = [added[text] for text in sorted(TURN_MARKS & added.keys()) if not added[text].special]
    words = [text for text in sorted(TURN_MARKS - added.keys()) if every and fast.token_to_id(text) is not None]
    fast.add_special_tokens([
        *(AddedToken(token.content, normalized=token.normalized, lstrip=token.lstrip, rstrip=token.rstrip) for token in plain),
        *(AddedToken(text, normalized=False) for text in words)])


def _without_dropout(fast: Fast) -> None:
    """Merges left out at random belong to training."""
    if getattr(fast.model, "dropout", None):
        fast.model.dropout = None

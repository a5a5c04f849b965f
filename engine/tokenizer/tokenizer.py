"""Token ids <-> text, whole and as a stream."""
from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer as Fast

from ..base_parts import BaseFile
from ..weights.files import FormatError, parse_json_object, read_bounded, show
from . import gguf as tokenizer_gguf

MAX_TOKENIZER_BYTES = 64 << 20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of one base. Ids from 0 to `vocab_size` - 1; ids beyond (padding of the embedding) stand for no text."""

    def __init__(self, base: BaseFile) -> None:
        """Raises FormatError naming the file and what in it cannot be honoured."""
        source = base.tokenizer
        if source.gguf is not None:
            kinds = source.gguf.get("tokenizer.ggml.token_type") or [1] * base.facts.vocab
            self._fast = _guarded(lambda: tokenizer_gguf.build(source.gguf, source.gguf["tokenizer.ggml.tokens"], kinds, base.path), base.path)
            self.add_bos = tokenizer_gguf.adds_bos_by_default(source.gguf) if source.add_bos is None else source.add_bos
        else:
            data = read_bounded(source.json_path, MAX_TOKENIZER_BYTES)
            parse_json_object(data, source.json_path)
            self._fast = _guarded(lambda: Fast.from_buffer(data), source.json_path)
            self.add_bos = self._post_processor_adds(source.bos) if source.add_bos is None else source.add_bos
        self._fast.no_truncation()
        self._fast.no_padding()
        self.bos, self.eos = source.bos, source.eos
        self.end_tokens = base.end_tokens
        self.model_vocab = base.facts.vocab
        self.special_texts = dict(source.texts)
        """bos_token, eos_token, ... as chat templates name them"""
        self._read_vocabulary(base)

    def _read_vocabulary(self, base: BaseFile) -> None:
        vocab = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        where = base.tokenizer.json_path or base.path
        if not 0 < self.vocab_size <= base.facts.vocab:
            raise FormatError(f"{where}: has token ids up to {self.vocab_size - 1:,}, the model's vocabulary holds {base.facts.vocab:,}; "
                              "the tokenizer is of another model")
        self._texts: list[str | None] = [None] * self.vocab_size
        for text, number in vocab.items():
            self._texts[number] = text
        if base.tokenizer.gguf is not None:
            self._texts = list(base.tokenizer.gguf["tokenizer.ggml.tokens"])
            self.vocab_size = len(self._texts)
        added = self._fast.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self.special = {token.content: number for number, token in added.items() if token.special}
        """text -> id of the tokens that are parsed only when asked for"""
        self.eats_space = {number: (token.lstrip, token.rstrip) for number, token in added.items() if token.special}
        """id of such a token -> whether it takes the white space before it, after it"""
        self._special_ids = frozenset(self.special.values())
        steps = _decoding_steps(self._fast, where)
        self._byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._strips_space = any(map(_strips_first_space, steps))

    def _post_processor_adds(self, bos: int | None) -> bool:
        return bos is not None and self._fast.encode("a").ids[:1] == [bos] and self._fast.encode("a", add_special_tokens=False).ids[:1] != [bos]

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of `text`, nothing added. `special`: special tokens spelled in it become those tokens; else they stay text."""
        self._fast.encode_special_tokens = not special
        return self._fast.encode(text.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. `special`: special tokens are spelled out, else they give nothing."""
        return self._strip_first(b"".join(self._bytes(i, special) for i in ids)).decode("utf-8", errors="replace")

    def token_text(self, ids: Iterable[int]) -> list[str]:
        """Every token by itself, for display: special ones spelled out, parts of characters as U+FFFD, unknown ids as "<id>"."""
        return [self._bytes(i, True).decode("utf-8", errors="replace") if self._known(i) else f"<{i}>" for i in ids]

    def _known(self, number: int) -> bool:
        return 0 <= number < self.vocab_size and self._texts[number] is not None

    def _bytes(self, number: int, special: bool) -> bytes:
        if not self._known(number) or number in self._special_ids and not special:
            return b""
        if number in self._added:
            return self._added[number].encode("utf-8", "replace")
        text = self._texts[number]
        if self._byte_level:
            return _from_byte_level(text)
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(tokenizer_gguf.SPACE, " ").encode("utf-8", "replace")

    def _strip_first(self, data: bytes) -> bytes:
        """SentencePiece puts a space before the first word; it is no part of the text."""
        return data[1:] if self._strips_space and data.startswith(b" ") else data


class TextStream:
    """A reply's text as its tokens come: `push` gives the text that is certain now, `finish` the rest.

    Characters come whole; all pieces joined equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._started = False

    def push(self, token: int) -> str:
        data = self._tokenizer._bytes(token, False)
        if data and not self._started:
            self._started = True
            data = self._tokenizer._strip_first(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for the beginning of a character that never ended."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in text)
    except KeyError:
        return text.encode("utf-8", "replace")


def _decoding_steps(fast: Fast, where: object) -> list[dict[str, Any]]:
    """How tokens become text. Raises FormatError for a step that is not known here: its text would come out wrong."""
    decoder: dict[str, Any] = json.loads(fast.decoder.__getstate__()) if fast.decoder is not None else {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    for step in steps:
        kind = step["type"]
        space = step.get("pattern") == {"String": tokenizer_gguf.SPACE} and step.get("content") == " "
        if kind not in ("ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace") and not (kind == "Replace" and space):
            raise FormatError(f"{where}: decodes with {kind}, which is not supported; byte-level and SentencePiece tokenizers are")
    return steps


def _strips_first_space(step: dict[str, Any]) -> bool:
    return step["type"] == "Strip" and step.get("start", 0) > 0 or step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"


def _guarded(build: Callable[[], Fast], where: object) -> Fast:
    """The library raises bare Exceptions and, where it panics, a BaseException of its own."""
    try:
        return build()
    except (FormatError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise FormatError(f"{where}: the tokenizer cannot be built ({show(str(error), 200)}); download the file again") from None

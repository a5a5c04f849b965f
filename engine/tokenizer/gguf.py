"""A tokenizer out of GGUF metadata: byte-level BPE ("gpt2"), SentencePiece ("llama") and unigram ("t5")."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..tokenizer_sizes import check_added
from ..weights.files import FormatError, show
from .pre import PRE_TOKENIZERS
from .sentence_piece import CONTROL, UNKNOWN, UNUSED, USER_DEFINED, piece_bpe, unigram

Strips = Mapping[int, tuple[bool, bool]]
"""id -> whether the token takes the white space before it, after it"""


def adds_bos_by_default(metadata: Mapping[str, Any]) -> bool:
    """What a file that lacks tokenizer.ggml.add_bos_token means."""
    pre = metadata.get("tokenizer.ggml.pre")
    return (metadata.get("tokenizer.ggml.model") == "llama"
            or isinstance(pre, str) and pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].adds_bos)


def is_filler(text: str, number: int, kind: int) -> bool:
    """Whether a token only fills the vocabulary up to the embedding: converters name the rows without token [PADn]."""
    return kind == UNUSED and text == f"[PAD{number}]"


def build(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], source: object, strips: Strips) -> Tokenizer:
    """The tokenizer that the metadata describes; special tokens are those of type control or unknown.

    Raises FormatError naming `source` and the key that cannot be honoured.
    """
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in MODELS:
        raise FormatError(f"{source}: tokenizer model {show(model)} is not supported; {', '.join(MODELS)} are "
                          "(byte-level BPE, SentencePiece BPE, SentencePiece unigram)")
    check_added([text for text, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN, USER_DEFINED)], source)
    tokenizer = MODELS[model](metadata, tokens, kinds, source)
    tokenizer.add_special_tokens(_added(tokens, kinds, (CONTROL, UNKNOWN), strips))
    tokenizer.add_tokens(_added(tokens, kinds, (USER_DEFINED,), strips))
    return tokenizer


def _added(tokens: Sequence[str], kinds: Sequence[int], wanted: tuple[int, ...], strips: Strips) -> list[AddedToken]:
    found = [(text, *strips.get(i, (False, False))) for i, text in enumerate(tokens) if kinds[i] in wanted and text]
    return [AddedToken(text, normalized=False, lstrip=left, rstrip=right) for text, left, right in found]


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], source: object) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise FormatError(f"{source}: tokenizer.ggml.pre is {show(name)}, which is not supported, and a guess would give wrong tokens; "
                          f"supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    pre = PRE_TOKENIZERS[name]
    vocab = {text: i for i, text in reversed(list(enumerate(tokens))) if not is_filler(text, i, kinds[i])}
    merges = _merges(metadata.get("tokenizer.ggml.merges"), vocab, source)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words_first))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(lines: Any, vocab: Mapping[str, int], source: object) -> list[tuple[str, str]]:
    if not isinstance(lines, list):
        raise FormatError(f"{source}: holds no list tokenizer.ggml.merges, which a BPE tokenizer needs; the file is corrupt")
    merges = []
    for line in lines:
        left, space, right = line.partition(" ") if isinstance(line, str) else ("", "", "")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(f"{source}: the merge {show(line)} in tokenizer.ggml.merges does not join two tokens to a third; "
                              "the file is corrupt")
        merges.append((left, right))
    return merges


MODELS = {"gpt2": _byte_level, "llama": piece_bpe, "t5": unigram}
"""tokenizer.ggml.model -> its builder"""

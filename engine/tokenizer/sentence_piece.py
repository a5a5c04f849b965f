"""SentencePiece vocabularies: BPE by score ("llama") and unigram ("t5")."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from ..tokenizer_sizes import check_pieces
from ..weights.files import FormatError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""token types, the same in SentencePiece and in GGUF, that are treated apart; 1 is a plain piece"""
SPACE = "▁"
DOUBLE_SPACES = " {2,}"
OUTER_SPACES = r"\A +| +\z"
"""spaces alone: other white space stays unless the character map makes spaces of it, as SentencePiece and llama.cpp have it"""
MAX_PIECE = 512
"""characters of a piece; SentencePiece makes none longer than 16 unless told to, and 512 at most"""


def piece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], source: object) -> Tokenizer:
    """Pieces are joined by score, what is none becomes bytes. The space before the first word is left away when text is made of ids."""
    scores = _scores(metadata, tokens, source)
    vocab = {text: i for i, text in reversed(list(enumerate(tokens)))}
    mergeable = {text: i for text, i in vocab.items() if text and kinds[i] not in (UNKNOWN, CONTROL, USER_DEFINED, BYTE)}
    longest = max(map(len, mergeable), default=0)
    if longest > MAX_PIECE:
        raise FormatError(f"{source}: has a token of {longest:,} characters where SentencePiece makes {MAX_PIECE} at most; "
                          "the file is corrupt")
    tokenizer = Tokenizer(models.BPE(
        vocab=vocab, merges=_merges_by_score(mergeable, scores), unk_token=_unknown(tokens, kinds), fuse_unk=True, byte_fallback=True,
    ))
    tokenizer.normalizer, tokenizer.decoder = _ends(metadata, False, source)
    return tokenizer


def unigram(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], source: object) -> Tokenizer:
    """The pieces whose scores have the highest sum. Pieces that the user defined cost nothing."""
    scores = _scores(metadata, tokens, source)
    if UNKNOWN not in kinds:
        raise FormatError(f"{source}: no token is of the type unknown, which a unigram tokenizer needs; the file is corrupt")
    pieces = [(text, 0.0 if kind == USER_DEFINED else float(score)) for text, kind, score in zip(tokens, kinds, scores, strict=True)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=list(kinds).index(UNKNOWN), byte_fallback=BYTE in kinds))
    tokenizer.normalizer, tokenizer.decoder = _ends(metadata, True, source)
    return tokenizer


def _scores(metadata: Mapping[str, Any], tokens: Sequence[str], source: object) -> Sequence[float]:
    check_pieces(tokens, source)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or isinstance(scores, str) or not hasattr(scores, "__len__") or len(scores) != len(tokens):
        raise FormatError(f"{source}: tokenizer.ggml.scores does not have one score for each of {len(tokens):,} tokens; "
                          "the file is corrupt")
    if not all(isinstance(score, int | float) and score == score for score in scores):
        raise FormatError(f"{source}: tokenizer.ggml.scores holds something that is no number; the file is corrupt")
    return scores


def _unknown(tokens: Sequence[str], kinds: Sequence[int]) -> str | None:
    return next((text for text, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)


def _ends(metadata: Mapping[str, Any], tidy: bool, source: object) -> tuple[Any, Any]:
    """(normalizer, decoder). Text is changed by the file's own character map, freed of spaces at its ends and of double ones
    (`tidy`: where the file does not say), given a space in front, and its spaces become U+2581."""
    steps: list[Any] = []
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None and charsmap != b"":
        steps.append(normalizers.Precompiled(_charsmap(charsmap, source)))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", tidy):
        steps += [normalizers.Replace(Regex(OUTER_SPACES), ""), normalizers.Replace(Regex(DOUBLE_SPACES), " ")]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps += [normalizers.Prepend(SPACE)] if prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)]), decoder


def _charsmap(value: Any, source: object) -> bytes:
    """GGUF holds it as an array of signed or unsigned bytes."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) or not hasattr(value, "__iter__") or not all(isinstance(byte, int) and -128 <= byte < 256 for byte in value):
        raise FormatError(f"{source}: tokenizer.ggml.precompiled_charsmap is no list of bytes; the file is corrupt")
    return bytes(byte % 256 for byte in value)


def _merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges ranked by the score of what they make, the longer left half first: the order that transformers' converter gives them."""
    merges: list[tuple[str, str]] = []
    ranked = sorted(vocab, key=lambda text: (-scores[vocab[text]], vocab[text]))
    for _, texts in groupby(ranked, key=lambda text: scores[vocab[text]]):
        equals = [(left, right) for text in texts for cut in range(len(text) - 1, 0, -1)
                  if (left := text[:cut]) in vocab and (right := text[cut:]) in vocab]
        equals.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        merges += equals
    return merges

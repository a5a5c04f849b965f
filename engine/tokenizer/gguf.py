"""A tokenizer out of GGUF metadata: byte-level BPE ("gpt2") and SentencePiece ("llama")."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..weights.files import FormatError, show

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""token types of the format that are treated apart"""
SPACE = "▁"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
}
"""tokenizer.ggml.pre -> the patterns that cut text into words, one after another"""
_WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3")
"""pre-tokenizers whose models take a word that is a token as it stands, without merging"""


def adds_bos_by_default(metadata: Mapping[str, Any]) -> bool:
    """What a file that lacks tokenizer.ggml.add_bos_token means."""
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in ("llama3", "llama-v3", "llama-bpe")


def build(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], source: object) -> Tokenizer:
    """The tokenizer that the metadata describes; special tokens are those of type control or unknown.

    Raises FormatError naming `source` and the key that cannot be honoured.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise FormatError(f"{source}: tokenizer model {show(model)} is not supported; gpt2 (byte-level BPE) and llama (SentencePiece) are")
    tokenizer = (_byte_level if model == "gpt2" else _sentence_piece)(metadata, tokens, kinds, source)
    special = [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, kinds, strict=True) if t and k in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if t and k == USER_DEFINED])
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], source: object) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise FormatError(f"{source}: tokenizer.ggml.pre is {show(pre)}, which is not supported, and a guess would give wrong tokens; "
                          f"supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    vocab = {text: i for i, text in reversed(list(enumerate(tokens)))}
    merges = _merges(metadata.get("tokenizer.ggml.merges"), vocab, source)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(lines: Any, vocab: Mapping[str, int], source: object) -> list[tuple[str, str]]:
    if not isinstance(lines, list):
        raise FormatError(f"{source}: holds no list tokenizer.ggml.merges, which a BPE tokenizer needs; the file is corrupt")
    merges = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(f"{source}: the merge {show(line)} in tokenizer.ggml.merges does not join two tokens to a third; the file is corrupt")
        merges.append((left, right))
    return merges


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], source: object) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or isinstance(scores, str) or len(scores) != len(tokens):
        raise FormatError(f"{source}: tokenizer.ggml.scores does not have one score for each of {len(tokens):,} tokens; the file is corrupt")
    vocab = {text: i for i, text in reversed(list(enumerate(tokens)))}
    mergeable = {text: i for text, i in vocab.items() if text and kinds[i] not in (UNKNOWN, CONTROL, USER_DEFINED, BYTE)}
    unknown = next((text for text, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(
        vocab=vocab, merges=_merges_by_score(mergeable, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True,
    ))
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if len(steps) == 2 else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest: the same as merges ranked by the score of what they make."""
    found = []
    for text, number in vocab.items():
        for cut in range(1, min(len(text), 64)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[number], number, vocab[left], left, right))
    found.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in found]

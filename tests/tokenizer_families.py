"""Small tokenizers made as the families in use make theirs: tokenizer.json, and the GGUF metadata that a converter writes of it."""
from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

from lora_bench.engine.base_parts import TokenizerSource
from lora_bench.engine.tokenizer import Tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>")
HARD = [
    "", " ", "  ", "   \n \t\n\n", "hello world", "Hello, World!", "def f(x):\n    return x**2  # ok\n\n\nif x == '__main__':\n\tg(3)\r\n",
    "我想在apple工作1314151天～", "日本語テキスト。한국어 텍스트", "👨‍👩‍👧‍👦 🏳️‍🌈 😀😀", "مرحبا بالعالم שלום עולם",
    "e\u0301 a\u0308 n\u0303 \u1e9b\u0323 x\u0301\u0302\u0303y", "0 12 123 1234 12345 123456 3.14159e-10 ½ Ⅻ १२३",
    "I'm you're WE'LL don't 'tis it's", "<|im_end|></s><s>[INST] <think>ok</think>\n", "\x00\x01\x1b[31m\x7f\u200b\ufeff\u2028", "a" * 300,
    "ab " * 50, "กิน ไทย हिन्दी தமிழ்", "zażółć ÀÉÎÕÜ ß ſ", "$€£¥ ±×÷ “quotes” ‘x’ —…", "http://x.y/z?a=b&c=d#e", "\t\tif (a&&b){c+=d;}//e",
    "camelCaseHTTPServer XMLHttpRequest ABCdef", "a\u00a0b\u3000c\u2003d", "one\r\n\r\ntwo /// \n/x",
]


def texts(seed: int, count: int = 150) -> list[str]:
    """The hard ones, and random ones of characters that have rules of their own."""
    chance = random.Random(seed)
    pools = ["abc XYZ 019 ", "àéîøß", "漢字かな한", "👨‍👩‍👧🦜😀", " \t\n\r", "'\"<|>[]{}.,!?/", "\u202e\u200b\x00\x1b", "ÿĀġ",
             "e\u0301\u0302", "กิहि", "ABCdefGHI"]
    return HARD + ["".join(chance.choice(chance.choice(pools)) for _ in range(chance.randint(0, 40))) for _ in range(count)]


def corpus() -> list[str]:
    """Text to train on, so that merges of all kinds come out: this file and the hard strings, without the special tokens in them."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True) + HARD * 3
    return [re.sub("|".join(map(re.escape, SPECIAL + ADDED)), "", line) for line in lines]


def byte_level(patterns: list[str], normalizer: Any = None, ignore_merges: bool = False) -> Fast:
    """Byte-level BPE; `patterns` as tokenizer.json of the family has them, "Digits" for that pre-tokenizer."""
    fast = Fast(models.BPE(ignore_merges=ignore_merges))
    cuts = [pre_tokenizers.Digits(individual_digits=True) if p == "Digits" else pre_tokenizers.Split(Regex(p), "isolated")
            for p in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns or patterns[-1] == "Digits")
    fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    if normalizer is not None:
        fast.normalizer = normalizer
    fast.decoder = decoders.ByteLevel()
    fast.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=900, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return _finished(fast)


def sentence_piece(prefix: bool) -> Fast:
    """BPE over whole text with byte tokens, as converted SentencePiece models are: with a space in front (llama), without (gemma)."""
    trained = Fast(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=600, limit_alphabet=80, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    vocab = {text: i for i, text in enumerate(pieces)}
    ranks = {a + b: rank for rank, (a, b) in reversed(list(enumerate(map(tuple, model["merges"]))))}
    halves = [(text[:cut], text[cut:]) for text in ranks for cut in range(1, len(text))]
    merges = sorted((pair for pair in halves if pair[0] in vocab and pair[1] in vocab),
                    key=lambda pair: (ranks["".join(pair)], -len(pair[0])))
    fast = Fast(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")])
    if not prefix:
        fast.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return _finished(fast)


def unigram() -> Fast:
    """Unigram over whole text, as such SentencePiece models are: a space in front of all text, also of text that begins with one."""
    fast = Fast(models.Unigram())
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    fast.train_from_iterator(corpus(), trainers.UnigramTrainer(
        vocab_size=700, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.pre_tokenizer = None
    return fast


def unigram_metadata(fast: Fast, clean: bool) -> dict[str, Any]:
    """What a converter writes of it: the pieces in order with their scores."""
    tokens, scores = zip(*json.loads(fast.to_str())["model"]["vocab"], strict=True)
    kinds = [2 if token == "<unk>" else 3 if token in SPECIAL else 1 for token in tokens]
    metadata = {"model": "t5", "tokens": list(tokens), "scores": list(scores), "token_type": kinds, "add_space_prefix": True,
                "remove_extra_whitespaces": clean}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def _finished(fast: Fast) -> Fast:
    fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    fast.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return fast


def gguf_metadata(fast: Fast, **more: object) -> dict[str, Any]:
    """What a converter writes of it: types of tokens, merges or scores, rows without token filled up to a multiple of 64."""
    model = json.loads(fast.to_str())["model"]
    added = fast.get_added_tokens_decoder()
    known = {number: text for text, number in fast.get_vocab(with_added_tokens=True).items()}
    size = -(-(max(known) + 1) // 64) * 64
    byte_tokens = model.get("byte_fallback")
    kinds = [5 if i not in known else 2 if known[i] == "<unk>" else (3 if added[i].special else 4) if i in added
             else 6 if byte_tokens and known[i].startswith("<0x") else 1 for i in range(size)]
    tokens = [known.get(i, f"[PAD{i}]") for i in range(size)]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if byte_tokens:
        ranks = {a + b: float(rank) for rank, (a, b) in reversed(list(enumerate(map(tuple, model["merges"]))))}
        scores = [-ranks.get(text, 1e6) if kind == 1 else 0.0 for text, kind in zip(tokens, kinds, strict=True)]
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
    else:
        metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]]}
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def of_source(source: TokenizerSource, vocab: int) -> Tokenizer:
    """A tokenizer of a base of which only the tokenizer matters."""
    return Tokenizer(SimpleNamespace(tokenizer=source, facts=SimpleNamespace(vocab=vocab), end_tokens=(), path=Path("x.gguf")))


def of_fast(fast: Fast, folder: Path, vocab: int = 4096) -> Tokenizer:
    """Our tokenizer out of the tokenizer.json of `fast`."""
    fast.save(str(folder / "tokenizer.json"))
    return of_source(TokenizerSource(path=folder / "tokenizer.json"), vocab)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

FAMILIES: dict[str, tuple[str, Callable[[], Fast]]] = {
    "llama 3": ("llama-bpe", lambda: byte_level([_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST], ignore_merges=True)),
    "smollm3": ("smaug-bpe", lambda: byte_level([_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST], ignore_merges=True)),
    "olmo2, phi-4": ("dbrx", lambda: byte_level([_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST])),
    "qwen2, qwen3": ("qwen2", lambda: byte_level([_CONTRACTIONS + _WORDS + r"|\p{N}" + _REST], normalizers.NFC())),
    "mistral nemo": ("tekken", lambda: byte_level([
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _SLASH], ignore_merges=True)),
    "phi-4-mini": ("gpt-4o", lambda: byte_level([
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
        + _SLASH])),
    "smollm2": ("smollm", lambda: byte_level(["Digits"])),
    "granite 3": ("refact", lambda: byte_level(["Digits"])),
    "gpt-2": ("gpt-2", lambda: byte_level([])),
}
"""family -> (tokenizer.ggml.pre, maker of its tokenizer)"""

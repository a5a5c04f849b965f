"""How text is cut into words before byte-level BPE: one entry for each `tokenizer.ggml.pre`.

A GGUF file names the rule only; these are the patterns (of the Oniguruma engine, as in tokenizer.json) and the other
settings that the tokenizer.json of the families behind the name have. Where llama.cpp cuts by an approximation of the
family's own pattern (tekken, gpt-4o) or leaves its normalizer out (qwen2), the family's own is meant.
"""
from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` cut the text one after another, each the pieces of those before; what matches none stays as it is."""

    patterns: tuple[str, ...]
    nfc: bool = False
    """text is composed (Unicode NFC) first"""
    whole_words_first: bool = False
    """a word that is a token as it stands is taken without merging"""
    adds_bos: bool = False
    """what a file without tokenizer.ggml.add_bos_token means"""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
"""words end where lower case turns to upper; %s: what may follow a word"""
_TEKKEN = _CASED % ("", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_DEEPSEEK3 = (
    r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""" + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")

_PLAIN = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_CL100K = PreTokenizer((_LLAMA3,))
_LLAMA_BPE = replace(_CL100K, whole_words_first=True, adds_bos=True)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "trillion", "mellum"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone", "minerva-7b"), _DIGITS),  # refact: granite 3.x
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0"), _LLAMA_BPE),
    "smaug-bpe": replace(_LLAMA_BPE, adds_bos=False),  # vocabularies of llama 3 without its BOS: SmolLM3
    "dbrx": _CL100K,  # OLMo 2, Phi-4, Granite 4
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), whole_words_first=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),  # Phi-4-mini
    "seed-coder": PreTokenizer((_SEED,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
}
"""tokenizer.ggml.pre -> its rule"""

"""The tokenizer.json of a Hugging Face folder: built, used, and given to what reads a base's vocabulary."""
from __future__ import annotations

import json
from pathlib import Path
from random import Random

from lora_bench.engine.base_file import FormatError, open_base
from lora_bench.engine.tokenizer import Tokenizer

from .. import tiny
from ..bench import use_tokenizer, write_files
from ..mutations import mutate_json
from ..target import Run, Target

PREPEND = {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
FALLBACK = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                                             {"type": "Fuse"},
                                             {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
SPLIT = {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": r"\p{L}+|\s+|\p{N}"}, "behavior": "Isolated", "invert": False},
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
SINGLE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
          "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
          "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
WORDS = [*tiny.TOKENIZER, *tiny.TOKENS[:8], "BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Metaspace", "ByteFallback", "Fuse",
         "Strip", "Replace", "Regex",
         "String", "Split", "Digits", "Whitespace", "Sequence", "NFC", "NFKC", "Lowercase", "Prepend", "Precompiled",
         "precompiled_charsmap", "TemplateProcessing",
         "byte_fallback", "ignore_merges", "unk_token", "fuse_unk", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_id",
         "special", "lstrip",
         "rstrip", "normalized", "single_word", "content", "id", "prepend_scheme", "always", "replacement", "▁", "(?:a+)+$", "(?=(a*))*",
         "\\p{L}+|.", "Isolated", "cls", "sep",
         "BertNormalizer", "CTC", "max_length", "direction", "Left", "strategy"]


def seeds() -> list[bytes]:
    whole = tiny.TOKENIZER
    pieces = tiny.PIECES[:3] + [piece for piece in tiny.PIECES[3:] if not piece.startswith("<")]
    bpe = {"type": "BPE", "vocab": {text: i for i, text in enumerate(pieces)}, "merges": [["▁", "a"], ["a", "b"], ["▁a", "b"]],
           "unk_token": "<unk>",
           "fuse_unk": True, "byte_fallback": True}
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [[piece, -float(i)] for i, piece in enumerate(pieces)]}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    added = whole["added_tokens"][:3]
    files = [
        whole, whole | {"pre_tokenizer": SPLIT, "post_processor": SINGLE}, whole | {"normalizer": {"type": "NFC"}},
        whole | {"added_tokens": [*whole["added_tokens"], {**added[0], "id": 48, "content": "th", "special": False, "lstrip": True}]},
        whole | {"model": whole["model"] | {"merges": ["t h", "h e"], "ignore_merges": True}},
        whole | {"model": bpe, "normalizer": PREPEND, "pre_tokenizer": None, "decoder": FALLBACK, "added_tokens": added},
        whole | {"model": unigram, "pre_tokenizer": metaspace, "decoder": metaspace, "added_tokens": added},
        whole | {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
                 "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                             "pad_token": "<unk>"}},
    ]
    return [json.dumps(file).encode() for file in files]


def prepare(folder: Path) -> Run:
    base = write_files(folder / "base", tiny.base_files(Random(1)))

    def run(data: bytes) -> None:
        (base / "tokenizer.json").write_bytes(data)
        use_tokenizer(Tokenizer(open_base(base)))

    return run


TARGET = Target(
    seeds, lambda data, other, random: mutate_json(data, other, random, WORDS), prepare, (FormatError, OSError),
    lambda folder: str(folder / "base"))

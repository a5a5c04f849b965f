"""Bounds on what a tokenizer.json may ask for: time of its patterns, growth of its normalizer, number of its tokens.

The library underneath bounds each match of a pattern (Oniguruma's limit of ten million retries) and then gives up with
an error, but not the matches of a text together; and it applies any replacement. So what can take more than linear time or
memory on some text is refused when the tokenizer is opened.
"""
from __future__ import annotations

import json
import time
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Fast

from ..weights.files import FormatError, show
from .guarded import library
from .pre import PRE_TOKENIZERS
from .sentence_piece import DOUBLE_SPACES

MAX_PATTERN = 8192
"""characters of all patterns; the longest in use has 1,200"""
MAX_STEPS = 64
MAX_GROWTH = 64
"""times that a normalizer may lengthen a text; Unicode's own forms stay under 20"""
_SEQUENCES = ("normalizers", "pretokenizers", "processors")
"""what the parts of a step of type Sequence are called"""
_KNOWN = frozenset({DOUBLE_SPACES, *(pattern for pre in PRE_TOKENIZERS.values() for pattern in pre.patterns)})
_PLAIN = "Hello, naïve 漢字 😀\n\t 123"
_PROBE, _PROBE_SECONDS = 16384, 0.25
"""characters of the longest probe, and processor time for it; the patterns of known models take 0.005, square time 0.5"""


def check_bounds(fast: Fast, where: object) -> None:
    """Raises FormatError for a tokenizer that some text could stall, or that fails on any, naming `where` and the part of it."""
    steps = [*_steps(fast.normalizer), *_steps(fast.pre_tokenizer)]
    if len(steps) > MAX_STEPS:
        raise FormatError(f"{where}: prepares text in {len(steps)} steps, more than the {MAX_STEPS} that are accepted")
    _check_growth(steps, where)
    _check_template(fast.post_processor, where)
    patterns = {p["Regex"] for step in steps if isinstance(p := step.get("pattern"), dict) and "Regex" in p} - _KNOWN
    if sum(map(len, patterns)) > MAX_PATTERN:
        raise FormatError(f"{where}: cuts text by patterns of more than {MAX_PATTERN} characters, which is not accepted")
    with library(where, "its tokenizer fails on plain text; download the file again"):
        fast.encode(_PLAIN)
    if patterns:
        _probe(fast, "".join(sorted(patterns)), where)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The normalizers, pre-tokenizers or post-processors of a component, those inside sequences too."""
    waiting = [json.loads(part.__getstate__())] if part is not None else []
    while waiting:
        step = waiting.pop(0)
        if step.get("type") == "Sequence":
            waiting = [*(part for kind in _SEQUENCES for part in step.get(kind, ())), *waiting]
        else:
            yield step


def _check_growth(steps: list[dict[str, Any]], where: object) -> None:
    growth = 1
    for step in steps:
        match step.get("type"):
            case "Replace":
                growth *= max(1, len(step["content"]))
            case "Prepend":
                growth *= max(1, len(step["prepend"]))
            case "Precompiled":
                growth *= max(1, _longest_replacement(b64decode(step["precompiled_charsmap"])) // 4)
        if growth > MAX_GROWTH:
            raise FormatError(f"{where}: its normalizer can lengthen a text more than {MAX_GROWTH} times ({step['type']}), "
                              "which is not accepted")


def _check_template(processor: Any, where: object) -> None:
    """What is put around the ids of a text: the library repeats them as often as it is told to."""
    steps = list(_steps(processor))
    single = [piece for step in steps for piece in step.get("single", ())]
    texts = sum("Sequence" in piece for piece in single)
    if texts > max(1, sum("single" in step for step in steps)) or len(single) > MAX_STEPS or len(steps) > MAX_STEPS:
        raise FormatError(f"{where}: its post_processor writes a text {texts} times among {len(single)} pieces, which is not accepted")


def _longest_replacement(charsmap: bytes) -> int:
    """Bytes of the longest text that a SentencePiece character map puts in place of another: what follows its trie, each ended by 0."""
    trie = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + trie:].split(b"\0")), default=0)


def _probe(fast: Fast, patterns: str, where: object) -> None:
    """Time the texts that patterns stumble over: runs of one character, of every kind and of those that the patterns name."""
    named = "".join(dict.fromkeys(character for character in patterns if not character.isascii() or character.isalnum()))[:32]
    for character in " a1\n!é漢" + named:
        for size in (32, 256, 2048, 6144, _PROBE):
            before = time.thread_time()
            with library(where, f"its pattern fails on {size} times {show(character)}"):
                fast.encode(character * size + "! " + named, add_special_tokens=False)
            if time.thread_time() - before > _PROBE_SECONDS * max(size, 2048) / _PROBE:
                raise FormatError(f"{where}: cuts text by the pattern {show(patterns)}, which takes too long for {size} "
                                  f"times {show(character)}, and is not accepted")

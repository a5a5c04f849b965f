"""Errors in words: what an exception says to the person, and whether it means that memory ran out."""
from __future__ import annotations

import re

import psutil
import torch

from .protocol import Mix

_ASKED = re.compile(r"tried to allocate ([\d.]+ ?(?:bytes|[KMGT]iB))", re.IGNORECASE)
_RAN_OUT = "can't allocate memory", "annot allocate memory", "failed to map segment"
"""words of torch, of the system, and of what loads libraries"""


class OutOfMemory(ValueError):
    """The machine's memory is too small for what was asked; the text has the numbers."""


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, of the device or of the machine."""
    if isinstance(error, (MemoryError, OutOfMemory, torch.OutOfMemoryError)) or any(words in str(error) for words in _RAN_OUT):
        return True
    behind = error.__cause__ or error.__context__
    return isinstance(error, OSError) and behind is not None and out_of_memory(behind)


def refusal(error: BaseException) -> bool:
    """Whether `error` says that something cannot be had (what it names is wrong, or memory ran out); any other is a fault of ours."""
    return isinstance(error, (ValueError, OSError)) or out_of_memory(error)


def sentence(error: BaseException) -> str:
    """ValueError and OSError carry sentences of ours or of the system; anything else is named by its kind."""
    if out_of_memory(error) and not isinstance(error, ValueError):
        return _memory_sentence(str(error))
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, (ValueError, OSError)) or not str(error) else f"{type(error).__name__}: {text}"


def not_finite(where: str, mix: Mix, dtype: str) -> str:
    """What to say of logits `where` ("token 7") that are NaN or infinite under `mix`, on a base in `dtype`, and what to do."""
    if uses := [f"{use.name} x {use.scale:g}" for use in mix if use.scale != 0]:
        why = f"(mix: {', '.join(uses)}); lower the scales"
    else:
        wider = "load it with --dtype fp32, or get" if dtype != "fp32" else "get"
        why = f"with no adapter in its mix: that is the base's own doing; {wider} another copy of the base"
    return f"the model computed numbers that are not finite at {where} {why}"


def _memory_sentence(text: str) -> str:
    asked = _ASKED.search(text)
    more = f" when {asked[1]} more were asked for" if asked else ""
    if "CUDA" in text and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        state = f"{free:,} of the device's {total:,} bytes are free"
    else:
        memory = psutil.virtual_memory()
        state = (f"the engine holds {psutil.Process().memory_info().rss:,} bytes, "
                 f"{memory.available:,} of the machine's {memory.total:,} are free")
    return f"memory ran out{more}: {state}; close other programs, or take a smaller model, a smaller context, dtype bf16 or fewer adapters"

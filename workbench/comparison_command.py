"""The command line that asks the same again."""
from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..engine.protocol import AdapterUse, Chat, Prompt
from .arguments import escape
from .comparison import Setup
from .text import clean


def sampling_words(setup: Setup) -> list[str]:
    """The options of a command line that draw as `setup` does."""
    s = setup.sampling
    words = ["--max-tokens", str(s.max_tokens)]
    if s.temperature > 0:
        words += ["--temperature", str(s.temperature), "--seed", str(s.seed), "--top-k", str(s.top_k), "--top-p", str(s.top_p),
                  "--min-p", str(s.min_p)]
    if s.repetition_penalty != 1:
        words += ["--repetition-penalty", str(s.repetition_penalty)]
    return [*words, *(word for stop in s.stop for word in ("--stop", escape(stop)))]


def compare_command(setup: Setup, prompts: Sequence[Prompt], source: str | None = None) -> str:
    """The command line that asks the same again: of the prompts in the file `source`, or of one plain question."""
    words = ["lora-bench", "compare", *model_words(setup)]
    for column in setup.columns:
        option = f"--{column.label.lower()}"
        words += [word for use in column.mix for word in (option, _adapter(setup, use))] or [option, "base"]
    return shlex.join([*words, *prompt_words(prompts, source), *sampling_words(setup)])


def sweep_command(setup: Setup, prompts: Sequence[Prompt], source: str | None = None) -> str:
    """The same of a sweep."""
    turned, *beside = setup.columns[-1].mix
    words = ["lora-bench", "sweep", *model_words(setup), "--lora", _adapter(setup, turned).rpartition(":")[0], "--scales",
             ",".join(str(column.mix[0].scale) if i else "0" for i, column in enumerate(setup.columns))]
    words += [word for use in beside for word in ("--with", _adapter(setup, use))]
    return shlex.join([*words, *prompt_words(prompts, source), *sampling_words(setup)])


def _adapter(setup: Setup, use: AdapterUse) -> str:
    path = next((info.path for info in setup.adapters if info.name == use.name), use.name)
    return f"{use.name}={path}:{use.scale!r}"


def model_words(setup: Setup) -> list[str]:
    return [setup.model.path, "--dtype", setup.model.dtype, "--device", setup.model.device.partition(":")[0]]


def prompt_words(prompts: Sequence[Prompt], source: str | None) -> list[str]:
    """-p and what goes with it for one plain question, else -f: JSON lines of the report hold the prompts."""
    if source is None and len(prompts) == 1 and isinstance(prompts[0], Chat):
        roles = [message.role for message in prompts[0].messages]
        texts = [message.content for message in prompts[0].messages]
        if roles in (["user"], ["system", "user"]) and all(map(_typed, texts)):
            opening = ["--opening", escape(prompts[0].opening)] if prompts[0].opening else []
            return [*(["-s", texts[0]] if len(texts) == 2 else []), "-p", texts[-1], *opening]
    return ["-f", source or "prompts.jsonl"]


def _typed(text: str) -> bool:
    """Whether a command line can be shown that says exactly this."""
    return clean(text) == text

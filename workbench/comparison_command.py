"""The command line that asks the same again."""
from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..engine.protocol import Chat, Prompt
from .arguments import escape
from .comparison import Setup
from .text import clean


def sampling_words(setup: Setup) -> list[str]:
    """The options of a command line that draw as `setup` does."""
    s = setup.sampling
    words = ["--max-tokens", str(s.max_tokens)]
    if s.temperature > 0:
        words += ["--temperature", f"{s.temperature:g}", "--seed", str(s.seed), "--top-k", str(s.top_k), "--top-p", f"{s.top_p:g}",
                  "--min-p", f"{s.min_p:g}"]
    if s.repetition_penalty != 1:
        words += ["--repetition-penalty", f"{s.repetition_penalty:g}"]
    return [*words, *(word for stop in s.stop for word in ("--stop", escape(stop)))]


def compare_command(setup: Setup, prompts: Sequence[Prompt]) -> str:
    """The command line that asks the same again, when one can: the prompts in a file unless there is one plain question."""
    paths = {info.name: info.path for info in setup.adapters}
    words = ["lora-bench", "compare", *model_words(setup)]
    for column in setup.columns:
        for use in column.mix:
            words += [f"--{column.label.lower()}", f"{use.name}={paths.get(use.name, use.name)}:{use.scale!r}"]
        words += [] if column.mix else [f"--{column.label.lower()}", "base"]
    return shlex.join([*words, *prompt_words(prompts), *sampling_words(setup)])


def model_words(setup: Setup) -> list[str]:
    return [setup.model.path, "--dtype", setup.model.dtype, "--device", setup.model.device.partition(":")[0]]


def prompt_words(prompts: Sequence[Prompt]) -> list[str]:
    """-p and what goes with it for one plain question, else -f: JSON lines of the report hold the prompts."""
    if len(prompts) == 1 and isinstance(prompts[0], Chat):
        roles = [message.role for message in prompts[0].messages]
        texts = [message.content for message in prompts[0].messages]
        if roles in (["user"], ["system", "user"]) and all(map(_typed, texts)):
            opening = ["--opening", escape(prompts[0].opening)] if prompts[0].opening else []
            return [*(["-s", texts[0]] if len(texts) == 2 else []), "-p", texts[-1], *opening]
    return ["-f", "prompts.jsonl"]


def _typed(text: str) -> bool:
    """Whether a command line can be shown that says exactly this."""
    return clean(text) == text

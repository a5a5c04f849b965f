"""What the measurements of chats work on: adapters, and prompts as ids, so that whoever is compared gets the same."""
from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .chat import prompt_ids
from .protocol import Chat, Message

if TYPE_CHECKING:
    from .engine import Engine

TOPICS = ("sea", "moon", "wind", "snow")
"""of chats beside each other: with one prompt they would share what is stored of it"""


def story_ids(engine: Engine, number: int) -> list[int]:
    """The prompt of one of some chats that run beside each other."""
    chat = Chat((Message("user", f"Tell me a long story about the {TOPICS[number % len(TOPICS)]}."),))
    return prompt_ids(engine.model.tokenizer, engine.model.base.chat_template, chat)[0]


def random_ids(engine: Engine, draw: random.Random, count: int) -> list[int]:
    """Tokens that stand for text: none that ends a reply or belongs to the template."""
    tokenizer, rows = engine.model.tokenizer, engine.model.base.facts.vocab
    ids: list[int] = []
    while len(ids) < count:
        token = draw.randrange(rows)
        if token not in engine.model.base.end_tokens and tokenizer.decode([token], special=False):
            ids.append(token)
    return ids


def load_adapters(engine: Engine, model: str | None, paths: Sequence[str], progress: Callable[[str], None]) -> list[str]:
    """The names of the adapters in `paths`; without any, and without `model`, of the sample adapters. Raises ValueError, OSError."""
    from ..sample_adapters import sample_adapters
    chosen = list(paths) or ([str(path) for _, path in sample_adapters()] if model is None else [])
    names = []
    for path in chosen:
        progress(f"loading {os.path.basename(path)}")
        names.append(engine.load_adapter(path).name)
    return names


def write_random_adapters(engine: Engine, rank: int, count: int, folder: Path, progress: Callable[[str], None]) -> list[str]:
    """The paths of so many adapters of `rank` on all linears of the base, all different, written into `folder`."""
    import torch

    from .random_base import random_adapter
    from .random_files import write_adapter
    paths = []
    for number in range(count):
        name = f"random-{number + 1}"
        progress(f"making adapter {name} of rank {rank}")
        read = random_adapter(engine.model.base.facts, name, rank, torch.device("cpu"), torch.bfloat16)
        write_adapter(folder / name, read.adapter)
        paths.append(str(folder / name))
    return paths

"""The ids that the penalty on repetition acts on: those of the prompt and the reply, each token looked at once."""
from __future__ import annotations

import random

import torch

from lora_bench.engine.seen_ids import SeenIds

CPU = torch.device("cpu")


class Watched(list[int]):
    """Ids that count how many of them are looked at."""

    read = 0

    def __getitem__(self, where: object) -> object:
        found = super().__getitem__(where)  # type: ignore[call-overload]
        self.read += len(found) if isinstance(where, slice) else 1
        return found

    def __iter__(self) -> object:
        self.read += len(self)
        return super().__iter__()


def test_the_mask_is_what_the_ids_are_and_a_step_looks_at_its_new_tokens_alone(seed: int) -> None:
    draw = random.Random(seed)
    ids, seen = Watched(draw.choices(range(60), k=draw.randint(1, 40))), SeenIds()
    for _ in range(50):
        seen.mask(ids, 50, CPU)
        new = draw.choices(range(60), k=draw.randint(0, 3))  # some have a row of the embedding and none of the head
        ids.extend(new)
        ids.read = 0
        mask = seen.mask(ids, 50, CPU)
        assert ids.read == len(new)
        assert mask.nonzero().flatten().tolist() == sorted({number for number in list.__iter__(ids) if number < 50})


def test_another_vocabulary_has_a_mask_of_its_own_size() -> None:
    ids, seen = [3, 7, 9], SeenIds()
    for size, expected in ((8, [3, 7]), (10, [3, 7, 9]), (4, [3])):
        assert seen.mask(ids, size, CPU).shape == (size,) and seen.mask(ids, size, CPU).nonzero().flatten().tolist() == expected

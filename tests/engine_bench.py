"""An engine on a tiny base with its events kept, for the tests that drive it step by step."""
from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import (
    AdapterUse,
    Event,
    Generate,
    LoadModel,
    Mix,
    RequestFinished,
    RequestStarted,
    Sampling,
    TextDelta,
    TokenIds,
)

PROMPT = TokenIds((5, 6, 7, 8, 9, 10, 11))
NAMES = ("one", "two", "three")
ONE, TWO, THREE = ((AdapterUse(name, 0.5),) for name in NAMES)


def random_ids(count: int, seed: int = 0) -> tuple[int, ...]:
    """None of them special in the tiny models."""
    draw = random.Random(seed)
    return tuple(draw.randrange(5, 50) for _ in range(count))


class Bench:
    def __init__(self, base: Path, **load: object) -> None:
        self.events: list[Event] = []
        self.engine = Engine(self.events.append)
        options = {"device": "cpu"} | load
        exact = {"dtype": "fp32"} if options["device"] == "cpu" else {}
        self.engine.load_model(LoadModel(str(base), **exact | options))

    def submit(self, number: int, prompt: object = PROMPT, mix: Mix = (), **sampling: object) -> None:
        self.engine.submit(Generate(number, prompt, mix, Sampling(**{"max_tokens": 20} | sampling)))

    def run(self, steps: int = 10_000) -> None:
        while steps and self.engine.step():
            steps -= 1

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def text(self, number: int) -> str:
        return "".join(event.text for event in self.of(TextDelta) if event.request_id == number)

    def finished(self, number: int) -> RequestFinished:
        (event,) = [event for event in self.of(RequestFinished) if event.request_id == number]
        return event

    def started(self, number: int) -> list[RequestStarted]:
        return [event for event in self.of(RequestStarted) if event.request_id == number]

    def same(self, prompt: Sequence[int], mix: Mix, ids: Sequence[int], other: Sequence[int]) -> bool:
        """Equal, or parted where the two best tokens are as good as equal: a batch may round otherwise."""
        if tuple(ids) == tuple(other):
            return True
        at = next(i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
        best = self.engine.logits([*prompt, *ids[:at]], mix).topk(2).values
        return bool(best[0] - best[1] < 1e-3 * best[0].abs())

    def ids(self, number: int) -> tuple[int, ...]:
        return self.finished(number).ids

    def reply(self, mix: Mix = (), **settings: object) -> tuple[int, ...]:
        """The reply to a request that runs alone; no event is left behind."""
        self.submit(999, mix=mix, **settings)
        self.run()
        ids = self.ids(999)
        self.events.clear()
        return ids

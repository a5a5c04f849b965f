"""A store of adapters over a random model, for tests: its events are kept, its tokenizer has words for tokens."""
from __future__ import annotations

from typing import Any

import torch

from lora_bench.engine.adapter_store import AdapterStore
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts, tensor_shapes
from lora_bench.engine.protocol import Event

BYTES = 2 * (4 * 24 + 36 * 4 + 4 * 24 + 12 * 4) * 4
"""of the folder fixture's usual adapter: rank 4 on q and v of two layers, fp32"""


class Words:
    """A tokenizer whose tokens are words "t5"."""

    def encode(self, text: str, special: bool) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: object, special: bool) -> str:
        return " ".join(f"t{number}" for number in ids)  # type: ignore[attr-defined]


class StoreBench:
    """A store over a random model of `facts`, and the events that it told."""

    def __init__(self, facts: ModelFacts, slots: int = 2, host_bytes: int = 10 * BYTES, **more: Any) -> None:
        self.events: list[Event] = []
        words = Words()
        weights = {name: torch.randn(shape) for name, shape in tensor_shapes(facts).items()}
        self.store = AdapterStore(
            Decoder(facts, weights, 16), slots, host_bytes, self.events.append, words, **more)  # type: ignore[arg-type]

    def seen(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def tiers(self) -> dict[str, str]:
        return {view.info.name: view.tier for view in self.store.adapter_views()}

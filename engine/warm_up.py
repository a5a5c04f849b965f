"""Steps of prompts that nobody asked for, run when a base is loaded: the first prompt then waits for no kernel to be compiled or loaded."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product

from torch import Tensor

from ..kernels.sampling import Draw, sample
from .active import Span
from .batch import Chunk, step_inputs
from .blocks import BlockTable, blocks_for
from .mix import ActiveUse, TokenMix
from .models.acting import active_lora
from .models.decoder import Decoder
from .routing import Routing

TOKENS = {"cpu": (1,), "cuda": (1, 128, 512, 2048)}
"""of the steps: torch multiplies matrices of other sizes by other kernels, and attention has two forms"""


def warm_up(decoder: Decoder, caches: Tensor, routing: Routing | None, progress: Callable[[int, int], None]) -> None:
    """Run steps without adapters and, unless it is None, under the one adapter of `routing`. What they store is garbage: no request may
    have KV blocks yet. `progress` hears before each how many have been run, of how many."""
    most = min(caches.shape[3] * caches.shape[4], decoder.context)
    sizes = sorted({min(tokens, most) for tokens in TOKENS[decoder.device.type]})
    steps = list(product(sizes, (None, routing) if routing is not None else (None,)))
    for number, (tokens, each) in enumerate(steps):
        progress(number, len(steps))
        _step(decoder, caches, tokens, each)


def _step(decoder: Decoder, caches: Tensor, tokens: int, routing: Routing | None) -> None:
    inputs = step_inputs([Chunk((0,) * tokens, 0, BlockTable(list(range(blocks_for(tokens)))), True)], decoder.device)
    lora = None
    if routing is not None:
        mix = TokenMix((), tuple(ActiveUse(name, 1.0, 0) for name in routing.columns))
        lora = active_lora(routing, [Span(mix, 0, tokens)], [Span(mix, tokens - 1, 1)])
    logits = decoder.forward(inputs, caches, lora, lambda op: None)
    for temperature in (0.0, 1.0):
        sample(logits, [Draw(temperature, vocab=decoder.head.weight.shape[0])])

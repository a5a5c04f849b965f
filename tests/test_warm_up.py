"""What is run when a base is loaded, so that the first prompt waits for nothing that is prepared once."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_bench import ONE, TWO, Bench, random_ids
from torch import Tensor

from lora_bench.engine import warm_up
from lora_bench.engine.active import Span
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BlockTable
from lora_bench.engine.mix import ActiveUse, TokenMix
from lora_bench.engine.models.acting import active_lora
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts, module_shapes
from lora_bench.engine.page_pool import PagePool
from lora_bench.engine.protocol import TokenIds
from lora_bench.engine.routing import RoutingCache
from lora_bench.engine.slots import fused_modules
from lora_bench.kernels import launch

CPU = torch.device("cpu")


def test_the_adapter_of_a_rehearsal_acts_on_every_linear_and_changes_nothing(
    tiny_facts: ModelFacts, tiny_tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, shapes = Decoder(tiny_facts, dict(tiny_tensors), 64), module_shapes(tiny_facts)
    sizes = {place: [shapes[module][0] for module in modules] for place, modules in fused_modules(tiny_facts).items()}
    routing = RoutingCache(tiny_facts.layers, sizes, CPU, PagePool(tiny_facts, 2, torch.float32, CPU)).rehearsal()
    assert routing is not None and all(len(linears) == 4 for linears in routing.layers[:-1])
    caches, mix = decoder.kv_cache(4, 16), TokenMix((), (ActiveUse("", 1.0, 0),))
    inputs = step_inputs([Chunk((5, 6, 7), 0, BlockTable([1]), True)], CPU)
    plain, under = (decoder.forward(inputs, caches, lora, lambda op: None)
                    for lora in (None, active_lora(routing, [Span(mix, 0, 3)], [Span(mix, 2, 1)])))
    assert torch.equal(plain, under)
    heard: list[tuple[int, int]] = []
    monkeypatch.setattr(warm_up, "TOKENS", {"cpu": (1, 40, 1 << 20)})
    warm_up.warm_up(decoder, caches, routing, lambda done, total: heard.append((done, total)))
    assert heard == [(done, 6) for done in range(6)]


@pytest.mark.gpu
def test_the_first_prompts_compile_nothing(make: Callable[..., Bench], seed: int) -> None:
    bench = make(device="cuda", dtype="bf16")
    known = set(launch._compiled)
    assert known
    for number, (tokens, mix) in enumerate(((50, ()), (3, ONE), (40, TWO), (17, (*ONE, *TWO)))):
        bench.submit(number, TokenIds(random_ids(tokens, seed + number)), mix, max_tokens=1)
        bench.run()
    assert set(launch._compiled) == known

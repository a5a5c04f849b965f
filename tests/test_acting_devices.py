"""All that an adapter may change, in one batch, on each device and in each dtype against the CPU in fp32.

No forward waits for its device.
"""
from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lora_bench.engine.active import Span
from lora_bench.engine.adapters.adapter import Adapter, AdapterWeights, LoraPair, TokenRows
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BlockTable
from lora_bench.engine.dora_rows import BaseSquares
from lora_bench.engine.mix import ActiveUse, TokenMix
from lora_bench.engine.models.acting import ActiveLora, active_lora
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts, module_shapes, tensor_shapes
from lora_bench.engine.page_image import build_image
from lora_bench.engine.page_pool import PagePool
from lora_bench.engine.protocol import AdapterInfo
from lora_bench.engine.routing import RoutingCache
from lora_bench.engine.slot_content import build_content
from lora_bench.engine.slots import Slot, fused_modules

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
FACTS = ModelFacts("llama", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=60, context=64, rms_eps=1e-5,
                   rope_theta=1e4, attention_bias=True)
BATCH: list[tuple[int, list[tuple[str, float]]]] = [
    (9, []), (7, [("plain", 1.0), ("dora", 0.5)]), (12, [("dora", 1.0), ("plain", -1.0), ("dora2", 0.7)]), (5, [("bias", 1.0)]),
    (8, [("embedding", 0.5), ("dora2", 1.0)]), (6, [("tokens", 1.0), ("plain", 1.0)]), (10, [("grown", 1.0)]),
    (4, [("grown", 0.3), ("dora", 1.0)]),
]


def _pair(d_in: int, d_out: int, dora: bool = False, bias: bool = False) -> LoraPair:
    return LoraPair(torch.randn(3, d_in) * 0.2, torch.randn(d_out, 3) * 0.2, 1.5, torch.randn(d_out) * 0.2 if bias else None,
                    torch.rand(d_out) + 0.5 if dora else None)


def _adapters(tensors: dict[str, Tensor]) -> dict[str, AdapterWeights]:
    shapes = module_shapes(FACTS)

    def linears(*kinds: str, **options: bool) -> dict[str, LoraPair]:
        return {name: _pair(d_in, d_out, **options) for name, (d_out, d_in) in shapes.items() if name.rsplit(".", 1)[-1] in kinds}

    def moved(name: str) -> Tensor:
        return tensors[name] + torch.randn_like(tensors[name]) * 0.2

    ids = torch.tensor([3, 7, 11])
    extra = torch.randn(2, FACTS.hidden)
    return {
        "plain": AdapterWeights(linears("q_proj", "down_proj", "lm_head")),
        "dora": AdapterWeights(linears("q_proj", "v_proj", "gate_proj", "down_proj", dora=True)),
        "dora2": AdapterWeights(linears("q_proj", "o_proj", "lm_head", dora=True),
                                replace(_pair(FACTS.vocab, FACTS.hidden), magnitude=torch.rand(FACTS.hidden) + 0.5)),
        "bias": AdapterWeights(linears("k_proj", bias=True), replaced={
            name: moved(name) for name in ("layers.0.self_attn.q_proj.bias", "norm.weight", "layers.1.input_layernorm.weight")}),
        "embedding": AdapterWeights({}, _pair(FACTS.vocab, FACTS.hidden)),
        "tokens": AdapterWeights({}, rows={name: TokenRows(ids, torch.randn(3, FACTS.hidden))
                                           for name in ("embed_tokens.weight", "lm_head.weight")}),
        "grown": AdapterWeights(linears("up_proj"), replaced={
            name: torch.cat([moved(name), extra]) for name in ("embed_tokens.weight", "lm_head.weight")}),
    }


def _info(name: str) -> AdapterInfo:
    return AdapterInfo(name=name, path="", format="", digest="", ranks=(), effective_scales=(), matched=0, total=0, targets={}, bytes=0,
                       rslora=False, dtype="", base_model="")


class _Side:
    def __init__(
        self, tensors: dict[str, Tensor], adapters: dict[str, AdapterWeights], device: str, dtype: torch.dtype, pages: int = 0,
    ) -> None:
        self.decoder = Decoder(FACTS, {name: tensor.to(device, dtype) for name, tensor in tensors.items()}, FACTS.context)
        shapes, squares = module_shapes(FACTS), BaseSquares()
        sizes = {place: [shapes[module][0] for module in modules] for place, modules in fused_modules(FACTS).items()}
        slots = [Slot(index) for index in range(len(adapters))]
        pool = PagePool(FACTS, pages, dtype, self.decoder.device) if pages else None
        for slot, (name, weights) in zip(slots, adapters.items(), strict=True):
            adapter = Adapter(_info(name), weights)
            image = build_image(adapter, pool.shapes, dtype, pool.pinned) if pool is not None else None
            content = build_content(adapter, self.decoder, squares, image)
            slot.fill(name, content.with_pages(pool.enter(image)) if pool is not None and image is not None else content)
        self.routing = RoutingCache(FACTS.layers, sizes, self.decoder.device, pool=pool).get(slots)
        for slot in slots:
            if pool is not None and slot.content is not None and slot.content.pages is not None:
                pool.wait(slot.content.pages)

    def prepared(self, ids: list[list[int]]) -> tuple[object, list[Tensor], ActiveLora]:
        spans = [Span(TokenMix((), tuple(ActiveUse(name, scale, 0) for name, scale in mix)), 0, count) for count, mix in BATCH]
        chunks = [Chunk(tokens, 0, BlockTable((i,)), True, True) for i, tokens in enumerate(ids)]
        return step_inputs(chunks, self.decoder.device), self.decoder.kv_cache(len(BATCH), 16), active_lora(self.routing, spans, spans)

    def logits(self, ids: list[list[int]]) -> Tensor:
        inputs, caches, lora = self.prepared(ids)
        return self.decoder.forward(inputs, caches, lora, lambda op: None).float().cpu()


@pytest.fixture
def sides(seed: int) -> tuple[list[list[int]], dict[str, Tensor], dict[str, AdapterWeights]]:
    tensors = {name: torch.randn(shape) * 0.15 + ("norm" in name) for name, shape in tensor_shapes(FACTS).items()}  # 0.3 amplifies rounding
    ids = [[random.choice([3, 7, 11, *range(60)]) for _ in range(count)] for count, _ in BATCH]
    ids[6][2], ids[7][1] = 60, 61
    return ids, tensors, _adapters(tensors)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("pages", [0, 7], ids=["whole", "in pages"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 0.03)])
def test_a_batch_of_all_kinds(sides: tuple, device: str, dtype: torch.dtype, tolerance: float, pages: int) -> None:
    ids, tensors, adapters = sides
    expected = _Side(tensors, adapters, "cpu", torch.float32).logits(ids)
    got = _Side(tensors, adapters, device, dtype, pages).logits(ids)
    assert got.shape == expected.shape
    for row, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (ours - theirs).norm() <= tolerance * theirs.norm(), row


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("pages", [0, 7], ids=["whole", "in pages"])
def test_the_forward_never_waits_for_the_device(sides: tuple, device: str, pages: int) -> None:
    ids, tensors, adapters = sides
    side = _Side(tensors, adapters, device, torch.bfloat16, pages)
    side.logits(ids)
    inputs, caches, lora = side.prepared(ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        side.decoder.forward(inputs, caches, lora, lambda op: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")

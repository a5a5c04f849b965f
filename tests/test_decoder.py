"""The decoder on random weights against a plain fp64 forward written out token by token."""
from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BlockTable
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts, RopeScaling, tensor_shapes
from lora_bench.kernels.attention import copy_block_

CPU = torch.device("cpu")
TINY = ModelFacts(architecture="llama", layers=2, hidden=24, heads=6, kv_heads=2, head_dim=8, intermediate=40, vocab=50, context=200,
                  rms_eps=1e-5, rope_theta=10000.0)
SHAPES = {
    "plain": TINY,
    "tied": replace(TINY, tied=True),
    "biases": replace(TINY, attention_bias=True, output_bias=True, mlp_bias=True),
    "one kv head": replace(TINY, kv_heads=1),
    "own head_dim": replace(TINY, head_dim=14, kv_heads=6),
    "linear rope": replace(TINY, rope_scaling=RopeScaling("linear", 4.0)),
    "llama3 rope": replace(TINY, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    "rope factors": replace(TINY, rope_freq_factors=True),
}


def _weights(facts: ModelFacts) -> dict[str, Tensor]:
    weights = {name: torch.randn(shape) / math.sqrt(shape[-1]) for name, shape in tensor_shapes(facts).items()}
    return weights | {name: 1 + tensor * 0.1 for name, tensor in weights.items() if "norm" in name} | {
        name: tensor.abs() + 1 for name, tensor in weights.items() if "rope" in name}


def _frequencies(facts: ModelFacts, weights: dict[str, Tensor]) -> list[float]:
    result = []
    for i in range(facts.head_dim // 2):
        f = facts.rope_theta ** (-2 * i / facts.head_dim)
        scaling = facts.rope_scaling
        if scaling and scaling.kind == "linear":
            f /= scaling.factor
        elif scaling:
            wavelength = 2 * math.pi / f
            if wavelength > scaling.original_context / scaling.low_freq_factor:
                f /= scaling.factor
            elif wavelength > scaling.original_context / scaling.high_freq_factor:
                smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor)
                f = (1 - smooth) * f / scaling.factor + smooth * f
        if facts.rope_freq_factors:
            f /= weights["rope_freqs.weight"][i].item()
        result.append(f)
    return result


def _plain(facts: ModelFacts, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [tokens, vocab] in fp64, no cache, no fusing."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    frequencies = _frequencies(facts, weights)

    def linear(x: Tensor, module: str) -> Tensor:
        return x @ w[f"{module}.weight"].T + w.get(f"{module}.bias", torch.zeros(1, dtype=torch.float64))

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + facts.rms_eps).sqrt() * w[name]

    def turned(x: Tensor, position: int) -> Tensor:
        half = facts.head_dim // 2
        out = x.clone()
        for i, f in enumerate(frequencies):
            c, s = math.cos(position * f), math.sin(position * f)
            out[..., i], out[..., i + half] = x[..., i] * c - x[..., i + half] * s, x[..., i + half] * c + x[..., i] * s
        return out

    x = w["embed_tokens.weight"][ids]
    for i in range(facts.layers):
        layer = f"layers.{i}"
        h = norm(x, f"{layer}.input_layernorm.weight")
        q, k, v = (linear(h, f"{layer}.self_attn.{p}_proj").view(len(ids), -1, facts.head_dim) for p in "qkv")
        q = torch.stack([turned(q[t], t) for t in range(len(ids))])
        k = torch.stack([turned(k[t], t) for t in range(len(ids))])
        mixed = torch.zeros(len(ids), facts.heads, facts.head_dim, dtype=torch.float64)
        for t in range(len(ids)):
            for head in range(facts.heads):
                kv = head // (facts.heads // facts.kv_heads)
                p = (k[: t + 1, kv] @ q[t, head] / math.sqrt(facts.head_dim)).softmax(0)
                mixed[t, head] = p @ v[: t + 1, kv]
        x = x + linear(mixed.flatten(1), f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate, up = linear(h, f"{layer}.mlp.gate_proj"), linear(h, f"{layer}.mlp.up_proj")
        x = x + linear(gate / (1 + (-gate).exp()) * up, f"{layer}.mlp.down_proj")
    x = norm(x, "norm.weight")
    return x @ w["embed_tokens.weight"].T if facts.tied else linear(x, "lm_head")


def _run(decoder: Decoder, caches: list[Tensor], chunks: list[Chunk]) -> Tensor:
    return decoder.forward(step_inputs(chunks, CPU), caches, None, lambda op: None)


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_in_one_step_and_then_token_by_token(name: str) -> None:
    facts = SHAPES[name]
    weights = _weights(facts)
    ids = [random.randrange(facts.vocab) for _ in range(45)]
    expected = _plain(facts, weights, ids)
    decoder = Decoder(facts, dict(weights), facts.context)
    caches = decoder.kv_cache(5, 16)
    for cache in caches:
        cache.fill_(float("nan"))
    table = BlockTable((1, 2, 3))
    got = [_run(decoder, caches, [Chunk(ids[:30], 0, table, True)])]
    got += [_run(decoder, caches, [Chunk([ids[t]], t, table, True)]) for t in range(30, 45)]
    torch.testing.assert_close(torch.cat(got).double(), expected[29:], atol=2e-4, rtol=1e-3)


def test_chunks_of_many_requests_in_scattered_blocks() -> None:
    weights = _weights(TINY)
    decoder = Decoder(TINY, dict(weights), TINY.context)
    caches = decoder.kv_cache(12, 16)
    for cache in caches:
        cache.fill_(float("nan"))
    tables = [BlockTable((1, 4, 9)), BlockTable((2, 3)), BlockTable((5, 7))]
    texts = [[random.randrange(TINY.vocab) for _ in range(n)] for n in (40, 20, 25)]
    _run(decoder, caches, [Chunk(texts[0][:17], 0, tables[0], False), Chunk(texts[1][:19], 0, tables[1], False)])
    got = _run(decoder, caches, [
        Chunk(texts[1][19:], 19, tables[1], True), Chunk(texts[0][17:], 17, tables[0], True), Chunk(texts[2], 0, tables[2], True)])
    expected = torch.stack([_plain(TINY, weights, texts[i])[-1] for i in (1, 0, 2)])
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-3)


def test_a_request_goes_on_from_shared_and_copied_blocks_with_the_same_bits() -> None:
    decoder = Decoder(TINY, _weights(TINY), TINY.context)
    ids = [random.randrange(TINY.vocab) for _ in range(60)]
    shared = random.randint(33, 47)
    caches = decoder.kv_cache(12, 16)
    caches.fill_(float("nan"))
    _run(decoder, caches, [Chunk(ids[:shared], 0, BlockTable((1, 2, 3)), False)])
    copy_block_(caches, 3, 9, shared - 32)
    alone = _run(decoder, caches, [Chunk(ids[shared:], shared, BlockTable((1, 2, 3, 4)), False, every=True)])
    other = _run(decoder, caches, [Chunk(ids[shared:], shared, BlockTable((1, 2, 9, 6)), False, every=True)])
    assert alone.isfinite().all() and torch.equal(alone, other)


def test_weights_are_handed_over_and_counted() -> None:
    weights = _weights(TINY)
    total = sum(tensor.nbytes for tensor in weights.values())
    given = dict(weights)
    assert Decoder(TINY, given, 10).nbytes == total
    assert not given

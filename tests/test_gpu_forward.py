"""The forward of decode steps on a CUDA device, for decoders of many forms, against the plain forward on the CPU in fp32."""
from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BlockTable
from lora_bench.engine.models.decode_forward import NO_RANKS, DecodeForward, DecodeStep
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import NORMS_AFTER, NORMS_AROUND, ModelFacts, Rope, tensor_shapes
from lora_bench.kernels.decode_attention import DecodeRows
from lora_bench.kernels.stamps import Stamps

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = ModelFacts(architecture="llama", layers=2, hidden=64, heads=6, kv_heads=2, head_dim=16, intermediate=96, vocab=70, context=200,
                   rms_eps=1e-5, rope_theta=10000.0)
FORMS = {
    "plain": PLAIN,
    "sizes that are no powers of two": replace(PLAIN, hidden=72, head_dim=10, intermediate=88),
    "biases": replace(PLAIN, attention_bias=True, output_bias=True, mlp_bias=True, tied=True),
    "norms after": replace(PLAIN, norms=NORMS_AFTER, qk_norm="all"),
    "norms around": replace(PLAIN, norms=NORMS_AROUND, qk_norm="head", activation="gelu_tanh", embedding_scale=3.0, logit_softcap=5.0,
                            attention_softcap=2.0, windows=(5, 0), local_rope=Rope(100.0)),
    "scales": replace(PLAIN, residual_scale=0.4, logit_divisor=3.0, attention_scale=0.3, rotary_dim=4, layers_without_rope=(1,)),
}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 0.006}
BLOCKS = 30


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_it_computes_what_the_plain_forward_does(form: str, dtype: torch.dtype, seed: int) -> None:
    facts, lengths = FORMS[form], [1, 2, 16, 17, 90, random.randint(3, 80), 33]
    weights = {name: torch.randn(shape) / math.sqrt(shape[-1]) for name, shape in tensor_shapes(facts).items()}
    weights |= {name: 1 + tensor * 0.1 for name, tensor in weights.items() if "norm" in name}
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    plain = Decoder(facts, {name: tensor.float() for name, tensor in weights.items()}, 200)
    ours = Decoder(facts, {name: tensor.to(CUDA) for name, tensor in weights.items()}, 200)
    caches, ids = plain.kv_cache(BLOCKS, 16).normal_().to(dtype), [random.randrange(70) for _ in lengths]
    blocks = random.sample(range(BLOCKS), BLOCKS)
    tables = [BlockTable([blocks.pop() for _ in range(-(-length // 16))]) for length in lengths]
    chunks = [Chunk((token,), length - 1, table, True) for token, length, table in zip(ids, lengths, tables, strict=True)]
    on_device, wide = caches.to(CUDA), caches.float()
    expected = plain.forward(step_inputs(chunks, CPU), wide, None, lambda op: None)
    for rows in (8, 16, 32):
        forward = DecodeForward(ours, on_device, 32, Stamps(torch.zeros(64, dtype=torch.int64, device=CUDA)))
        forward.logits.fill_(torch.nan)
        got = forward(DecodeStep(_padded(ids, rows, 0), _places(lengths, tables, rows), NO_RANKS)).cpu().float()[: len(ids), : facts.vocab]
        assert (got - expected).norm() <= CLOSE[dtype] * expected.norm(), rows
        assert (on_device.cpu().float() - wide).norm() <= CLOSE[dtype] * wide.norm(), "keys and values"
        if rows == 8:
            first = got
        assert torch.equal(got, first), "whatever the number of rows"


def _places(lengths: list[int], tables: list[BlockTable], rows: int) -> DecodeRows:
    table = torch.full((rows, 13), BLOCKS - 1, dtype=torch.int32)
    for row, one in enumerate(tables):
        table[row, : len(one.blocks)] = torch.tensor(one.blocks)
    positions = [length - 1 for length in lengths]
    return DecodeRows(_padded(positions, rows, -1), _padded(positions, rows, 0), table.to(CUDA))


def _padded(numbers: list[int], rows: int, rest: int) -> Tensor:
    return torch.tensor(numbers + [rest] * (rows - len(numbers)), dtype=torch.int32, device=CUDA)

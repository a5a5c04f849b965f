"""Steps of replies on a CPU against the decoder's usual forward, over packed weights."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_file import FACTS
from torch import Tensor

from lora_bench.engine import measured_base
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BLOCK_TOKENS, BlockTable
from lora_bench.engine.measured_base import MeasuredBase
from lora_bench.engine.models.cpu_forward import CpuForward, suits_cpu_forward
from lora_bench.engine.models.cpu_lora import _short
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import NORMS_AFTER, NORMS_AROUND, Rope
from lora_bench.engine.random_base import random_weights
from lora_bench.engine.scheduler import Work
from lora_bench.kernels.cpu.products import MOST_ROWS
from lora_bench.kernels.packed import PackedRows, PackedWeight
from lora_bench.kernels.packed_cpu import multiplies_packed

pytestmark = pytest.mark.skipif(not multiplies_packed(), reason="this CPU has no products of packed numbers")
LLAMA = replace(FACTS, layers=2, vocab=64)
CLOSE = 1e-5
"""the length of the differences over that of the logits: the two forwards add in other orders"""


def decoder_of(recoded: bool = True, **facts: object) -> Decoder:
    shape = replace(LLAMA, **facts)
    weights = random_weights(shape, torch.device("cpu"), torch.float32)
    return Decoder(shape, {name: packed(weight, recoded) if weight.dim() == 2 else weight for name, weight in weights.items()}, 256)


def packed(matrix: Tensor, recoded: bool) -> PackedWeight:
    data = quants.quantize(matrix.numpy(), GGMLQuantizationType.Q4_1)
    return PackedWeight((PackedRows("Q4_1", torch.from_numpy(data)),), torch.float32, recoded)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], tuple[Tensor, Tensor]]:
    """What a step gives in its own calls, and in the usual forward."""
    def run(step: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        taken: list[bool] = []
        takes = CpuForward.takes

        def counted(*given: object) -> bool:
            taken.append(takes(*given))
            return taken[-1]

        with monkeypatch.context() as patch:
            patch.setattr(CpuForward, "takes", counted)
            own = step().clone()
            patch.setattr(CpuForward, "takes", lambda *given: False)
            assert taken == [True]
            return own, step()

    return run


def apart(got: Tensor, wanted: Tensor) -> float:
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


GEMMA = {"norms": NORMS_AROUND, "activation": "gelu_tanh", "embedding_scale": 8.0}
KINDS = {
    "llama": {}, "tied": {"tied": True, "embedding_scale": 2.0, "attention_scale": 0.2}, "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": "head"}, "phi3": {"rotary_dim": 8}, "granite": {"residual_scale": 0.3, "logit_divisor": 3.0},
    "smollm3": {"layers_without_rope": (1,)}, "mistral": {"windows": (9, 9)},
    "gemma2": GEMMA | {"windows": (20, 0), "attention_softcap": 5.0, "logit_softcap": 3.0},
    "gemma3": GEMMA | {"windows": (20, 0), "qk_norm": "head", "local_rope": Rope(100.0)}, "biases": {"output_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("facts", KINDS.values(), ids=KINDS)
def test_rows_whose_blocks_lie_anywhere(facts: dict[str, object], both: Callable[..., tuple[Tensor, Tensor]]) -> None:
    decoder = decoder_of(**facts)
    caches = decoder.kv_cache(16, BLOCK_TOKENS).normal_()
    chunks = [Chunk((3,), 0, BlockTable([7]), True), Chunk((9,), 37, BlockTable([2, 3, 4]), True),
              Chunk((60,), 40, BlockTable([14, 5, 6]), False), Chunk((60,), 64, BlockTable([9, 1, 8, 0, 11]), True)]
    for several in (chunks, chunks[:1], chunks[3:]):
        inputs = step_inputs(several, decoder.device)
        own, usual = both(lambda inputs=inputs: decoder.forward(inputs, caches, None, lambda op: None))
        assert own.shape == (sum(chunk.sampled for chunk in several), 64) and apart(own, usual) < CLOSE


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("ranks", [(16,), (3, 16, 40), (1, 64, 64, 64)], ids=str)
def test_rows_of_different_adapters(
    ranks: tuple[int, ...], kind: str, both: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_base, "SCALE", 5.0)
    with torch.inference_mode():
        base = MeasuredBase(decoder_of(**KINDS[kind]), ranks, 1, 64)
        mixes = [(name,) for name in base.names] + [()]
        for mix in (mixes, mixes[:1]):
            requests = [base._request(names, 20 + 9 * index) for index, names in enumerate(mix)]
            for request in requests:
                request.commit(request.pending - 1)
            works = [Work(request, 1) for request in requests]
            own, usual = both(lambda works=works: base._runner._forward(works)[0])
            assert apart(own, usual) < 2 * CLOSE
            without = base._runner.decoder.forward(step_inputs([base._runner._chunk(work, False) for work in works], torch.device("cpu")),
                                                   base._caches, None, lambda op: None)
            assert apart(own[:1], without[:1]) > 4 * CLOSE, "the adapters act"
            base._end(requests)


def test_adapters_of_compositions_that_take_turns() -> None:
    """More of them than are kept ready: what a composition reads is there as long as the composition is."""
    with torch.inference_mode():
        base = MeasuredBase(decoder_of(), (8,) * 12, 1, 64)
        works = []
        for names in (base.names[:6], base.names[6:]):
            requests = [base._request((name,), 20) for name in names]
            for request in requests:
                request.commit(request.pending - 1)
            works.append([Work(request, 1) for request in requests])
        first, other = (base._runner._forward(some)[0].clone() for some in works)
        taken = [torch.full((count,), 1e3) for count in (512, 1024, 2048, 4096, 8192, 16384) * 40]  # where what is free may lie
        assert torch.equal(base._runner._forward(works[0])[0], first) and torch.equal(base._runner._forward(works[1])[0], other)
        assert taken


def test_the_bits_of_a_row_depend_on_nothing_beside_it() -> None:
    """Rows of three adapters, of none, of other lengths; alone and together, with other threads."""
    base = MeasuredBase(decoder_of(), (3, 9, 64), 1, 64)
    mixes = [*((name,) for name in base.names), (), base.names[:2], base.names[::2], base.names]
    requests = [base._request(names, 20 + 9 * index) for index, names in enumerate(mixes)]
    for request in requests:
        request.commit(request.pending - 1)
    with torch.inference_mode():
        together = base._runner._forward([Work(request, 1) for request in requests])[0].clone()
        for request, row in zip(requests, together, strict=True):
            assert torch.equal(base._runner._forward([Work(request, 1)])[0][0], row)


@pytest.mark.parametrize("exact", [True, False])
def test_factors_are_kept_short_where_nothing_is_lost(exact: bool) -> None:
    factor = torch.randn(16, 256).bfloat16().float()
    factor[3, 7] = 1.0 if exact else 1 + 2.0**-12
    short = _short(factor)
    assert short.dtype == (torch.bfloat16 if exact else torch.float32) and torch.equal(short.float(), factor)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_number_that_is_not_finite_is_not_hidden(kind: str) -> None:
    decoder = decoder_of(**KINDS[kind])
    caches = decoder.kv_cache(4, BLOCK_TOKENS).normal_()
    part = decoder.layers[0].qkv.weight.parts[0]
    part.data[0, 3, part.kind.code_bytes:].view(torch.float16)[:] = torch.inf
    logits = decoder.forward(step_inputs([Chunk((3,), 20, BlockTable([1, 2]), True)], decoder.device), caches, None, lambda op: None)
    assert logits.isnan().all()


def test_what_has_no_calls_of_its_own() -> None:
    decoder = decoder_of()
    inputs = step_inputs([Chunk((1, 2), 0, BlockTable([0]), True)], decoder.device)
    many = step_inputs([Chunk((1,), 0, BlockTable([0]), True)] * (MOST_ROWS + 1), decoder.device)
    assert not decoder._replies.takes(inputs, None) and not decoder._replies.takes(many, None)
    assert suits_cpu_forward(LLAMA, decoder.layers) and not suits_cpu_forward(LLAMA, decoder_of(recoded=False).layers)
    assert not suits_cpu_forward(replace(LLAMA, qk_norm="all"), decoder.layers)
    assert not suits_cpu_forward(replace(LLAMA, norms=NORMS_AFTER), decoder.layers)
    odd = decoder_of(heads=8, kv_heads=8, head_dim=40)
    assert not suits_cpu_forward(odd.facts, odd.layers), "the vectors of a head are not whole"

"""NaN and infinity, in the weights of a base, of an adapter, or where they are computed: refused or said, never a finite wrong answer."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_file import write_gguf

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.base_file import open_base
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import AdapterUse, Event, Generate, LoadModel, RequestFailed, Sampling, TokenIds
from lora_bench.engine.weights.entry import READABLE, TensorEntry
from lora_bench.engine.weights.files import FormatError
from lora_bench.engine.weights.load import load_weights
from lora_bench.kernels.attention import Span, paged_attention, reaches
from lora_bench.kernels.quant import QUANT_TYPES, dequantize, largest

KINDS = sorted(READABLE)
NAME = "layers.0.mlp.down_proj.weight"
BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_folder_with_one_bad_number_is_refused(name: str, bad: float, tiny_folder: Callable, tiny_tensors: dict) -> None:
    tensor = tiny_tensors[name.removeprefix("model.")].clone()
    tensor.view(-1)[torch.randint(tensor.numel(), ())] = bad
    base = open_base(tiny_folder(tensors={name: tensor}))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(FormatError, match=rf"model\.safetensors: tensor '{name}' holds numbers that are not finite"):
            load_weights(base, "cpu", dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_a_bad_scale_is_refused_dense_and_packed(kind: str, tmp_path: Path, seed: int) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"": kind}, np.random.default_rng(seed))
    entry = open_base(path).tensors[NAME]
    assert entry.type == kind
    block = seed % (entry.nbytes // QUANT_TYPES[kind].block_bytes)
    for start in QUANT_TYPES[kind].scales:
        for bad in BAD[:1] if kind == "MXFP4" else BAD:
            before = _write(entry, block, start, bad)
            for packed in (False, True):
                with pytest.raises(FormatError, match=r"a\.gguf: tensor 'blk\.0\.ffn_down\.weight' holds numbers that are not finite"):
                    load_weights(open_base(path), "cpu", torch.float32, packed=packed)
            _write(entry, block, start, before)
    load_weights(open_base(path), "cpu", torch.float32)


def _write(entry: TensorEntry, block: int, start: int, number: float | bytes) -> bytes:
    """Put a scale of a block into the file; what stood there."""
    kind = QUANT_TYPES[entry.type]
    new = number if isinstance(number, bytes) else torch.tensor([number]).to(kind.scale).view(torch.uint8).numpy().tobytes()
    with entry.file.open("r+b") as file:
        file.seek(place := entry.offset + block * kind.block_bytes + start)
        old = file.read(len(new))
        file.seek(place)
        file.write(new)
    return old


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_for_every_type(kind: str, seed: int) -> None:
    """Any bytes whose scales are finite: no number is beyond the bound, and one type's bound is no larger than its codes can reach."""
    for _ in range(8):
        data = torch.randint(256, (64 * QUANT_TYPES[kind].block_bytes,), dtype=torch.uint8)
        blocks, scale = data.view(64, -1), QUANT_TYPES[kind].scale
        for start in QUANT_TYPES[kind].scales:
            power = torch.randint(-12, 12, (64, 1)) if scale == torch.float16 else torch.randint(-60, 60, (64, 1))
            numbers = torch.ldexp(torch.ones(64, 1) if scale.itemsize == 1 else torch.randn(64, 1), power)
            blocks[:, start:start + scale.itemsize] = numbers.to(scale).view(torch.uint8)
        exact, bound = dequantize(data, kind).abs().max().item(), largest(data, kind)
        assert exact <= bound < 1e30


def test_numbers_too_large_for_the_dtype_are_refused(tiny_folder: Callable, tiny_tensors: dict) -> None:
    big = tiny_tensors["layers.0.self_attn.o_proj.weight"].clone()
    big[3, 4] = 70_000.0
    base = open_base(tiny_folder(tensors={"model.layers.0.self_attn.o_proj.weight": big}))
    assert torch.equal(load_weights(base, "cpu", torch.float32)["layers.0.self_attn.o_proj.weight"], big)
    load_weights(base, "cpu", torch.bfloat16)
    with pytest.raises(FormatError, match=r"o_proj.weight' holds numbers that are too large for float16; load the base with --dtype fp32"):
        load_weights(base, "cpu", torch.float16)


class Bench:
    def __init__(self, base: Path, dtype: str = "fp32") -> None:
        self.events: list[Event] = []
        self.engine = Engine(self.events.append)
        self.engine.load_model(LoadModel(str(base), device="cpu", dtype=dtype))

    def failure(self, *mix: AdapterUse, **sampling: float) -> str:
        """Why a request fails."""
        self.engine.submit(Generate(1, TokenIds((5, 6, 7)), mix, Sampling(max_tokens=3, **sampling)))
        while self.engine.step():
            pass
        return next(event.message for event in self.events if isinstance(event, RequestFailed))


def test_a_base_that_computes_bad_numbers_is_told_from_an_adapter(
    tiny_folder: Callable, tiny_tensors: dict, adapter_folder: Callable,
) -> None:
    head = tiny_tensors["lm_head.weight"] * 100
    bench = Bench(tiny_folder(tensors={"model.norm.weight": torch.full((24,), 3e38), "lm_head.weight": head}))
    bench.engine.load_adapter(str(adapter_folder("a")), "a")
    for mix in ((), (AdapterUse("a", 0.0),)):
        message = bench.failure(*mix)
        assert "no adapter in its mix" in message and "another copy of the base" in message and "lower" not in message
    bench.events.clear()
    assert "(mix: a x 1); lower the scales" in bench.failure(AdapterUse("a"))


@pytest.mark.parametrize("dtype, size", [("fp32", 3e30), ("bf16", 3e30), ("fp16", 300.0)])
def test_an_adapter_whose_product_overflows_in_one_head_is_refused(
    dtype: str, size: float, tiny_folder: Callable, adapter_folder: Callable,
) -> None:
    bench = Bench(tiny_folder(), dtype)
    path = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
    a, b = torch.zeros(4, 24), torch.zeros(36, 4)
    a[0] = b[:6, 0] = size
    with pytest.raises(AdapterError, match=r": B A of layers\.1\.self_attn\.q_proj times its effective scale .* too large for "):
        bench.engine.load_adapter(str(adapter_folder("a", tensors={path.format("A"): a, path.format("B"): b})), "a")
    a[0], a[1], b[:6, 0], b[6:, 1] = size, 1, 1, size
    bench.engine.load_adapter(str(adapter_folder("a", tensors={path.format("A"): a, path.format("B"): b})), "a")


@pytest.mark.parametrize("head", [0, 5])
@pytest.mark.parametrize("rows, before", [(1, 0), (1, 4), (3, 0), (3, 4)])
def test_attention_hides_no_bad_query(head: int, rows: int, before: int) -> None:
    caches = torch.randn(1, 2, 2, 2, 16, 8)
    seen = reaches([Span(0, rows, rows + before, ((0, 1),))], caches, 6)
    for bad in BAD:
        q = torch.randn(rows, 6, 8)
        q[-1, head, 3] = bad
        out = paged_attention(q, caches[0], seen)
        assert not out[-1].isfinite().all() and out[:-1].isfinite().all()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_k": 5}], ids=str)
def test_what_overflows_in_one_head_is_said(sampling: dict, tiny_folder: Callable, tiny_tensors: dict) -> None:
    """Finite weights whose products are not: the request fails in words, also where a prompt is one token."""
    big = tiny_tensors["layers.0.self_attn.q_proj.weight"].clone()
    big[:6] = torch.where(big[:6] > 0, 3e38, -3e38)
    bench = Bench(tiny_folder(tensors={"model.layers.0.self_attn.q_proj.weight": big}))
    assert bench.engine.logits([5]).isnan().any()
    assert "numbers that are not finite" in bench.failure(**sampling)

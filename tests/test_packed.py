"""Packed weights against dense ones, and big-endian files against their little-endian twins, for every type."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_bench import PROMPT, Bench
from gguf_file import FACTS, write_gguf
from torch import Tensor

from lora_bench.engine import config
from lora_bench.engine.base_file import open_base
from lora_bench.engine.failures import OutOfMemory
from lora_bench.engine.models.facts import module_shapes
from lora_bench.engine.plan import memory_plan
from lora_bench.engine.protocol import AdapterUse, LoadModel, ModelInfo
from lora_bench.engine.weights.entry import READABLE
from lora_bench.engine.weights.load import load_weights
from lora_bench.engine.weights.memory import weight_bytes
from lora_bench.kernels import packed
from lora_bench.kernels.packed import PackedWeight
from lora_bench.kernels.weights import Weight, base_linear, concat_rows, row_chunks, rows

KINDS = sorted(READABLE)
MIXED = {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K", "gate_proj": "F32", "up_proj": "Q4_0", "": "Q8_0"}


@pytest.fixture
def file(tmp_path: Path, seed: int) -> Callable[..., Path]:
    """`file(kinds, **options)`: a base of random blocks, the same ones at every call."""
    def write(kinds: dict[str, str], **options: object) -> Path:
        return write_gguf(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", kinds, np.random.default_rng(seed), **options)

    return write


def numbers(weight: Weight) -> Tensor:
    return torch.cat([chunk.clone() for _, chunk in row_chunks(weight)]) if len(weight.shape) == 2 else weight.float()


@pytest.mark.parametrize("kind", KINDS)
def test_byte_orders_and_packing_change_no_number(kind: str, file: Callable[..., Path]) -> None:
    little, big = open_base(file({"": kind})), open_base(file({"": kind}, order=">", version=2, alignment=128))
    dense = load_weights(little, "cpu", torch.float32)
    assert all(tensor.isfinite().all() for tensor in dense.values())
    for base, packed_too in ((little, True), (big, False), (big, True)):
        others = load_weights(base, "cpu", torch.float32, packed=packed_too)
        assert others.keys() == dense.keys()
        for name, tensor in dense.items():
            assert torch.equal(numbers(others[name]), tensor), name
            matrix = len(tensor.shape) == 2 and kind != "F32"
            assert isinstance(others[name], PackedWeight) == (packed_too and matrix), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_headers_say(dtype: torch.dtype, file: Callable[..., Path]) -> None:
    base = open_base(file(MIXED | {"o_proj": "F16"}))
    for packed_too in (False, True):
        weights = load_weights(base, "cpu", dtype, packed=packed_too)
        assert sum(weight.nbytes for weight in weights.values()) == weight_bytes(base.tensors.values(), dtype.itemsize, packed_too)
    assert isinstance(weights["layers.0.self_attn.o_proj.weight"], PackedWeight) == (dtype == torch.float32)
    assert not isinstance(weights["layers.0.mlp.gate_proj.weight"], PackedWeight)


@pytest.mark.parametrize("elements", [1, 3 * 256, 1 << 18])
@pytest.mark.parametrize("tokens", [1, 5])
def test_products_equal_those_with_dense_weights(
    elements: int, tokens: int, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(packed.CHUNK_ELEMENTS, "cpu", elements)
    base = open_base(file(MIXED))
    dense, small = (load_weights(base, "cpu", torch.float32, packed=packed_too) for packed_too in (False, True))
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"layers.0.{module}.weight"
        x, bias = torch.randn(tokens, dense[name].shape[1]), torch.randn(dense[name].shape[0])
        for given in (None, bias):
            wanted = base_linear(x.double(), dense[name].double(), None if given is None else given.double())
            ours = base_linear(x, small[name], given)
            assert ours.shape == wanted.shape and ours.dtype == x.dtype
            assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_parts_of_several_types_lie_under_each_other(file: Callable[..., Path]) -> None:
    base = open_base(file(MIXED))
    dense, small = (load_weights(base, "cpu", torch.float32, packed=packed_too) for packed_too in (False, True))
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        names = [f"layers.0.{'mlp' if 'proj' in part and part[0] in 'gu' else 'self_attn'}.{part}.weight" for part in group]
        whole, fused = torch.cat([dense[name] for name in names]), concat_rows([small[name] for name in names])
        assert isinstance(fused, PackedWeight) and fused.shape == whole.shape and fused.dtype == torch.float32
        assert fused.nbytes == sum(small[name].nbytes for name in names)
        assert torch.equal(numbers(fused), whole)
        x = torch.randn(3, whole.shape[1])
        wanted = base_linear(x, whole, None)
        assert (base_linear(x, fused, None) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        ids = torch.randint(0, whole.shape[0], (40,))
        assert torch.equal(rows(fused, ids), whole[ids])
        assert fused.parts[-1].data.data_ptr() == concat_rows([small[names[-1]]]).parts[-1].data.data_ptr(), "nothing is copied"


def test_rows_of_an_embedding(file: Callable[..., Path]) -> None:
    base = open_base(file({"": "Q6_K"}))
    dense, small = (load_weights(base, "cpu", torch.bfloat16, packed=packed_too)["embed_tokens.weight"] for packed_too in (False, True))
    ids = torch.tensor([0, FACTS.vocab - 1, 3, 3])
    assert torch.equal(rows(small, ids), rows(dense, ids)) and rows(small, ids).dtype == torch.bfloat16
    assert rows(small, ids[:0]).shape == (0, FACTS.hidden)


# -- the engine ------------------------------------------------------------------------------------
def of_weights(info: ModelInfo) -> list[str]:
    return [note for note in info.notes if "weights" in note]


def test_an_engine_answers_alike_with_packed_weights(file: Callable[..., Path]) -> None:
    base = file(MIXED)
    dense, small = Bench(base, weights="dense"), Bench(base, weights="packed")
    assert (dense.engine.model.info.weights, small.engine.model.info.weights) == ("dense", "packed")
    expected, got = dense.engine.logits(PROMPT.ids, ()), small.engine.logits(PROMPT.ids, ())
    assert (got - expected).norm() <= 1e-4 * expected.norm()
    plan = memory_plan(base)["memory"]["fp32"]
    for bench, name in ((dense, "dense"), (small, "packed")):
        assert bench.engine.model.info.weight_bytes == plan[f"{name}_weights_bytes"]
        assert not of_weights(bench.engine.model.info)


def test_adapters_act_alike_on_packed_weights(file: Callable[..., Path], adapter_folder: Callable[..., Path]) -> None:
    """DoRA needs the rows of the base, an embedding's LoRA its columns."""
    shapes = {name: shape for name, shape in module_shapes(FACTS).items() if name.endswith(("q_proj", "v_proj", "down_proj"))}
    tensors = {}
    for name, (d_out, d_in) in shapes.items():
        path = f"base_model.model.model.{name}"
        tensors |= {f"{path}.lora_A.weight": torch.randn(4, d_in), f"{path}.lora_B.weight": torch.randn(d_out, 4) / 10,
                    f"{path}.lora_magnitude_vector": torch.rand(d_out) + 0.5}
    embedding = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, FACTS.vocab),
                 "base_model.model.model.embed_tokens.lora_embedding_B": torch.randn(FACTS.hidden, 4)}
    folders = {"dora": adapter_folder("dora", ("q_proj", "v_proj", "down_proj"), tensors=tensors, use_dora=True),
               "embedding": adapter_folder("embedding", ("embed_tokens",), tensors=embedding)}
    base, found = file(MIXED), []
    for weights in ("dense", "packed"):
        engine = Bench(base, weights=weights).engine
        for name, folder in folders.items():
            engine.load_adapter(str(folder), name)
        mixes = ((), (AdapterUse("dora", 0.7),), (AdapterUse("embedding"),), (AdapterUse("dora"), AdapterUse("embedding", -0.5)))
        found.append([engine.logits(PROMPT.ids, mix) for mix in mixes])
    for expected, got in zip(*found, strict=True):
        assert (got - expected).norm() <= 1e-4 * expected.norm()
    assert all((other - found[0][0]).norm() > 1e-2 * found[0][0].norm() for other in found[0][1:]), "each adapter acts"


def test_weights_are_packed_unasked_when_dense_ones_are_too_large(file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base = file({"": "Q4_K"})
    plan = memory_plan(base)["memory"]["fp32"]
    dense, small = plan["dense_weights_bytes"], plan["packed_weights_bytes"]
    assert 4 * small < dense

    def free(count: int) -> None:
        monkeypatch.setattr(config, "_free_bytes", lambda device: count)

    free(2 * dense)
    bench = Bench(base)
    assert bench.engine.model.info.weights == "dense" and not of_weights(bench.engine.model.info)
    free(dense)
    info = bench.engine.load_model(LoadModel(str(base), "cpu", "fp32"))
    assert info.weights == "packed" and info.weight_bytes == small
    (note,) = of_weights(info)
    assert note.startswith(f"the weights stay packed as in the file, {small:,} bytes: "
                           f"{dense:,} bytes as fp32 are more than 75% of the {dense:,}")
    free(dense - 1)
    with pytest.raises(OutOfMemory, match=f"its weights take {dense:,} bytes as fp32, {small:,} packed.* choose weights packed"):
        bench.engine.load_model(LoadModel(str(base), "cpu", "fp32", weights="dense"))
    free(small - 1)
    with pytest.raises(OutOfMemory, match=f"{small:,} packed as in the file, {small - 1:,} bytes of memory are free"):
        bench.engine.load_model(LoadModel(str(base), "cpu", "fp32"))


def test_what_the_machine_can_never_hold_is_refused_with_the_base_before_it_still_loaded(
    file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(file(MIXED))
    monkeypatch.setattr(config, "_total_bytes", lambda device: 1000)
    with pytest.raises(OutOfMemory, match="cpu has 1,000 bytes of memory in all"):
        bench.engine.load_model(LoadModel(str(file(MIXED)), "cpu", "fp32"))
    assert bench.engine.model is not None


def test_packing_that_saves_nothing_is_said(file: Callable[..., Path]) -> None:
    info = Bench(file({"": "F32"}), weights="packed").engine.model.info
    assert info.weights == "dense"
    assert of_weights(info) == ["packed weights were asked for, but no matrix of this file is smaller so than as fp32"]

"""Adapters in GGUF files: what llama.cpp's converter makes of a PEFT adapter is the same adapter, and what is refused."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from lora_bench.engine.adapters.adapter import Adapter
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import is_adapter, open_adapter
from lora_bench.engine.inspect import inspect_path
from lora_bench.engine.models.facts import ModelFacts, module_shapes
from lora_bench.engine.models.names import gguf_module, permuted_heads

FACTS = ModelFacts(architecture="llama", layers=2, hidden=64, heads=6, kv_heads=2, head_dim=32, intermediate=96, vocab=80, context=64,
                   rms_eps=1e-5, rope_theta=1e4)
R, ALPHA = 32, 48.0
Pairs = Mapping[str, tuple[Tensor, Tensor]]


def random_pairs(facts: ModelFacts, embedding: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by canonical module, as PEFT has them."""
    shapes = module_shapes(facts) | ({"embed_tokens": (facts.hidden, facts.vocab)} if embedding else {})
    return {module: (torch.randn(R, d_in), torch.randn(d_out, R)) for module, (d_out, d_in) in shapes.items()}


def write(
    path: Path, facts: ModelFacts, pairs: Pairs, metadata: Mapping[str, object] = {}, tensors: Mapping[str, Tensor | None] = {},  # noqa: B006
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, big_endian: bool = False,
) -> Path:
    """`pairs` as convert_lora_to_gguf.py writes them; `metadata` (first) and `tensors` replace what is there, None takes it away."""
    writer = gguf.GGUFWriter(path, facts.architecture, endianess=gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE)
    usual = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": ALPHA}
    for key, value in (dict(metadata) | {key: value for key, value in usual.items() if key not in metadata}).items():
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    named: dict[str, Tensor | None] = {}
    for module, (a, b) in pairs.items():
        heads = permuted_heads(facts, module)
        if heads is not None:
            b = b.reshape(heads, 2, facts.head_dim // 2, -1).swapaxes(1, 2).reshape(b.shape)
        name = f"{gguf_module(module, facts)}.weight"
        named |= {f"{name}.lora_a": a.T if module == "embed_tokens" else a, f"{name}.lora_b": b}
    for name, tensor in (named | dict(tensors)).items():
        if tensor is not None:
            array = tensor.contiguous().numpy()
            writer.add_tensor(name, array if array.ndim == 1 else gguf.quants.quantize(array, kind),
                              raw_dtype=None if array.ndim == 1 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path, facts: ModelFacts = FACTS) -> Adapter:
    return load_adapter(open_adapter(path), facts, "it")


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("big_endian", [False, True])
def test_a_converted_adapter_is_the_same_adapter(seed: int, tmp_path: Path, architecture: str, big_endian: bool) -> None:
    facts = dataclasses.replace(FACTS, architecture=architecture)
    pairs = random_pairs(facts)
    written = dataclasses.replace(facts, architecture="llama") if architecture == "mistral" else facts
    adapter = read(write(tmp_path / "x.gguf", written, pairs, big_endian=big_endian), facts)
    found = dict(adapter.modules) | {"embed_tokens": adapter.weights.embedding}
    assert found.keys() == pairs.keys()
    for module, (a, b) in pairs.items():
        assert torch.equal(found[module].a, a) and torch.equal(found[module].b, b), module
    assert adapter.info.effective_scales == (ALPHA / R,) and adapter.info.ranks == (R,) and adapter.info.notes == ()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types(seed: int, tmp_path: Path, kind: str) -> None:
    pairs = random_pairs(FACTS)
    kind = gguf.GGMLQuantizationType[kind]
    adapter = read(write(tmp_path / "x.gguf", FACTS, pairs, kind=kind))
    for module, (a, b) in pairs.items():
        pair = adapter.weights.embedding if module == "embed_tokens" else adapter.modules[module]
        if module != "embed_tokens":  # its A is quantised along the other axis
            assert np.array_equal(pair.a.float().numpy(), gguf.quants.dequantize(gguf.quants.quantize(a.numpy(), kind), kind))
        assert (pair.b.float() - b).abs().max() < 0.05 and (pair.a.float() - a).abs().max() < 0.05


def test_fused_modules(seed: int, tmp_path: Path) -> None:
    facts = dataclasses.replace(FACTS, architecture="phi3", fused=True)
    pairs = random_pairs(facts)
    adapter = read(write(tmp_path / "x.gguf", facts, pairs), facts)
    assert torch.equal(adapter.modules["layers.1.self_attn.qkv_proj"].b, pairs["layers.1.self_attn.qkv_proj"][1])
    assert torch.equal(adapter.modules["layers.0.mlp.gate_up_proj"].a, pairs["layers.0.mlp.gate_up_proj"][0])


def test_what_the_file_says_of_itself(seed: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", FACTS, random_pairs(FACTS, embedding=False), {
        "adapter.lora.task_name": "pirate", "adapter.lora.prompt_prefix": "Arrr: ", "adapter.alora.invocation_tokens": [3, 4, 5],
        "general.name": "of pirates", "general.base_model.0.name": "tiny", "custom.key": "kept"})
    info = read(path).info
    assert (info.task, info.prompt_prefix, info.invocation_tokens, info.base_model) == ("pirate", "Arrr: ", (3, 4, 5), "tiny")
    assert info.metadata["custom.key"] == "kept" and info.metadata["general.name"] == "of pirates" and info.name == "it"
    seen = inspect_path(path)
    assert seen["more_metadata_keys"] == 0
    assert is_adapter(path) and (seen["kind"], seen["format"], seen["name"], seen["task"]) == ("adapter", "GGUF", "x", "pirate")
    assert seen["ranks"] == [R] and seen["effective_scales"] == [ALPHA / R] and seen["targets"]["attn_q"] == 2


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_without_alpha_the_scale_is_one_and_that_is_said(seed: int, tmp_path: Path, alpha: float | None) -> None:
    info = read(write(tmp_path / "x.gguf", FACTS, random_pairs(FACTS), {"adapter.lora.alpha": alpha})).info
    assert info.effective_scales == (1.0,) and any("the effective scale is 1" in note for note in info.notes)


def test_norms_and_tensors_of_the_base(seed: int, tmp_path: Path) -> None:
    norm = torch.randn(FACTS.hidden)
    adapter = read(write(tmp_path / "x.gguf", FACTS, random_pairs(FACTS), tensors={
        "blk.1.ffn_norm.weight": norm, "output_norm.weight": norm + 1, "rope_freqs.weight": torch.ones(16)}))
    assert torch.equal(adapter.weights.replaced["layers.1.post_attention_layernorm.weight"], norm)
    assert torch.equal(adapter.weights.replaced["norm.weight"], norm + 1) and len(adapter.weights.replaced) == 2
    assert any("rope_freqs" in note for note in adapter.info.notes)


@pytest.mark.parametrize(("metadata", "tensors", "words"), [
    ({"general.type": None}, {}, "general.type is missing"),
    ({"general.type": "model"}, {}, "general.type is 'model'"),
    ({"adapter.type": "control_vector"}, {}, "adapter.type is 'control_vector'"),
    ({"adapter.lora.alpha": float("nan")}, {}, "alpha is nan"),
    ({"adapter.lora.alpha": "8"}, {}, "alpha is '8'"),
    ({"adapter.alora.invocation_tokens": "x"}, {}, "invocation_tokens"),
    ({"adapter.alora.invocation_tokens": [80]}, {}, "token 80, the base's vocabulary ends at 79"),
    ({}, {"blk.0.attn_q.weight.lora_b": None}, "lora_b of the pair is missing"),
    ({}, {"blk.0.attn_q.weight.lora_a": None}, "lora_a of the pair is missing"),
    ({}, {"blk.0.attn_q.weight": torch.ones(4, 4)}, "is unexpected in an adapter"),
    ({}, {"blk.0.attn_q.weight.lora_a": torch.randn(64, R)}, "transposed"),
    ({}, {"blk.0.attn_q.weight.lora_b": torch.full((192, R), torch.nan)}, "not finite"),
    ({}, {"blk.0.attn_q.weight.lora_a": torch.randn(R, 60)}, "60 inputs and 192 outputs"),
    ({}, {"token_embd.weight.lora_a": torch.randn(R, 80)}, "transposed"),
    ({}, {"blk.0.ffn_norm.weight": torch.ones(60)}, "shape mismatch"),
    ({}, {"blk.0.attn_norm_norm.weight": torch.ones(64)}, "no place in the base"),
    ({}, {"blk.0.attn_q.weight.lora_a": torch.ones(R)}, "has shape"),
])
def test_what_cannot_be_is_named(
    seed: int, tmp_path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Tensor | None], words: str,
) -> None:
    path = write(tmp_path / "x.gguf", FACTS, random_pairs(FACTS), metadata, tensors)
    with pytest.raises(AdapterError, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_other_bases_and_no_tensors_are_refused(seed: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", FACTS, random_pairs(FACTS))
    with pytest.raises(AdapterError, match="architecture 'llama', the base is qwen2"):
        read(path, dataclasses.replace(FACTS, architecture="qwen2"))
    with pytest.raises(AdapterError, match="no tensors"):
        read(write(tmp_path / "none.gguf", FACTS, {}, tensors={"rope_freqs.weight": torch.ones(16)}))
    deeper = dataclasses.replace(FACTS, layers=3)
    with pytest.raises(AdapterError, match="layers.2, the base has layers.0 to layers.1"):
        read(write(tmp_path / "deep.gguf", deeper, random_pairs(deeper)))
    other = {name.replace("attn_q", "attn_x"): tensor for name, tensor in {"blk.0.attn_q.weight.lora_a": torch.ones(R, 64),
                                                                            "blk.0.attn_q.weight.lora_b": torch.ones(192, R)}.items()}
    with pytest.raises(AdapterError, match="no module of it matches"):
        read(write(tmp_path / "other.gguf", FACTS, {}, tensors=other))


def test_a_base_is_no_adapter(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf()
    assert not is_adapter(path)
    with pytest.raises(AdapterError, match="general.type is .*load a base as the base"):
        open_adapter(path)


def test_an_adapter_whose_kind_stands_behind_long_texts_is_one(tmp_path: Path) -> None:
    path = write(tmp_path / "long.gguf", FACTS, random_pairs(FACTS), {"adapter.lora.prompt_prefix": "a" * 70_000})
    assert is_adapter(path) and inspect_path(path)["kind"] == "adapter"
